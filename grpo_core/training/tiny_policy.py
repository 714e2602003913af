"""A policy made on the spot: a byte-pair tokenizer fitted to a task's text, and a randomly initialised Qwen3.

Contract: `make` leaves a directory that `transformers` loads with its Auto classes and that vLLM serves as it is.
It depends on its arguments alone: the same texts, sizes and seed give the same bytes.

Two choices make a fixed question cheap. Text is split at digits only, never at spaces, so that merges grow until a
sentence that every question repeats is one token; and the tokenizer is fitted to text *as the chat template renders
it*, so that the role line joins that token. Every byte is in the alphabet, so any other text can still be encoded.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from grpo_core.training.origin import OriginError

END_OF_TEXT = "<|endoftext|>"
START_OF_MESSAGE = "<|im_start|>"
END_OF_MESSAGE = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
HEAD_SIZE = 32  # the smallest that vLLM's attention on CPU accepts
BYTES = 256


class TinyPolicyError(OriginError):
    """The sizes asked for do not make a model."""


def make(
    directory: Path,
    texts: Iterable[str],
    *,
    hidden_size: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate_size: int,
    vocabulary_size: int,
    tie_word_embeddings: bool,
    seed: int,
    max_position_embeddings: int,
) -> None:
    """Write config.json, generation_config.json, model.safetensors (float32) and the tokenizer to `directory`.

    `texts` are user messages, without the template. `vocabulary_size` is the size of the embedding; the tokenizer
    has at most as many entries, fewer when the texts hold no more pairs worth merging. Raises TinyPolicyError.
    """
    if heads % kv_heads:
        raise TinyPolicyError(
            f"heads {heads} is not a multiple of kv_heads {kv_heads}; choose kv_heads that divides it"
        )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = fit_tokenizer(texts, vocabulary_size=vocabulary_size, max_length=max_position_embeddings)
    config = Qwen3Config(
        vocab_size=vocabulary_size,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_SIZE,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def fit_tokenizer(texts: Iterable[str], *, vocabulary_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `vocabulary_size` entries. Each digit is always a token of its own.

    Raises TinyPolicyError when the vocabulary has no room for the bytes and the special tokens.
    """
    special_tokens = [END_OF_TEXT, START_OF_MESSAGE, END_OF_MESSAGE]
    smallest = BYTES + len(special_tokens)
    if vocabulary_size < smallest:
        raise TinyPolicyError(
            f"vocabulary_size {vocabulary_size} has no room for all bytes and special tokens; use at least {smallest}"
        )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    pieces = (piece for text in texts for piece in (f"user\n{text}", "assistant\n", "\n"))
    bpe.train_from_iterator(
        pieces,
        trainers.BpeTrainer(
            vocab_size=vocabulary_size,
            special_tokens=special_tokens,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe,
        eos_token=END_OF_MESSAGE,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
