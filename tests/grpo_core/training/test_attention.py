"""A packed row gives every sequence the log-probs and the gradient it has alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from grpo_core.training import attention
from grpo_core.training.attention import (
    NAME,
    NO_PARENT,
    AttentionError,
    Blocks,
    Packing,
    Padded,
    block_structure,
    packed_attention,
)
from grpo_core.training.model import Policy
from grpo_core.training.sharing import lay_out

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
MODELS = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=2)),
    "qwen3 grouped": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16)),
    "qwen3 full": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=4, head_dim=8)),
    "llama one key": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1)),
    "llama tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True)),
}
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
WINDOWED = {
    "qwen3 window": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=4, head_dim=8, **WINDOW)),
}
LENGTHS = [5, 1, 9, 3]


def made(name: str) -> PreTrainedModel:
    torch.manual_seed(11)
    return (MODELS | WINDOWED)[name]().float().train()


def packed(model: PreTrainedModel, sequences: list[Tensor]) -> Tensor:
    """Log-prob of every token but the first of each sequence, from one packed row."""
    model.set_attn_implementation(NAME)
    lengths = [len(sequence) for sequence in sequences]
    tokens = torch.cat(sequences)
    first = torch.cumsum(torch.tensor([0, *lengths]), 0)[:-1]
    at = torch.tensor([i for i in range(len(tokens) - 1) if i + 1 not in set(first.tolist())])
    positions = torch.cat([torch.arange(length) for length in lengths])
    scores = Policy(model, temperature=0.7)(
        tokens[None], positions[None], Packing.of(lengths, tokens.device), at=at, targets=tokens[at + 1]
    )
    return scores.logprobs


def alone(model: PreTrainedModel, sequences: list[Tensor]) -> Tensor:
    """The same from the model itself, one sequence at a time, with its own eager attention."""
    model.set_attn_implementation("eager")
    parts = []
    for sequence in sequences:
        logits = model(input_ids=sequence[None]).logits[0, :-1] / 0.7
        parts.append(torch.log_softmax(logits, -1).gather(1, sequence[1:, None])[:, 0])
    return torch.cat(parts)


@pytest.mark.parametrize("name", MODELS)
def test_packed_equals_alone_in_value_and_gradient(name: str) -> None:
    torch.manual_seed(5)
    sequences = [torch.randint(61, (length,)) for length in LENGTHS]
    weights = torch.randn(sum(LENGTHS) - len(LENGTHS))
    results = []
    for score in (packed, alone):
        model = made(name)
        logprobs = score(model, sequences)
        (logprobs * weights).sum().backward()
        results.append((logprobs.detach(), {key: p.grad for key, p in model.named_parameters()}))
    (logprobs, gradients), (expected, expected_gradients) = results
    torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=1e-6)
    for key, gradient in expected_gradients.items():
        assert gradients[key] is not None, key
        torch.testing.assert_close(gradients[key], gradient, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("order", [[2, 0, 3, 1], [1], [0, 0]])
def test_neighbours_in_the_row_change_nothing(order: list[int]) -> None:
    torch.manual_seed(5)
    model = made("qwen3 grouped")
    sequences = [torch.randint(61, (length,)) for length in (4, 7, 2, 6)]
    singles = [packed(model, [sequence]) for sequence in sequences]
    together = packed(model, [sequences[number] for number in order])
    torch.testing.assert_close(together, torch.cat([singles[number] for number in order]), atol=1e-6, rtol=1e-6)


def shared(model: PreTrainedModel, sequences: list[Tensor]) -> tuple[Tensor, int]:
    """As `packed`, but what all sequences begin with is there once. Also the number of tokens in the row."""
    model.set_attn_implementation(NAME)
    layout = lay_out([sequence.numpy() for sequence in sequences], [0] * len(sequences))
    at = torch.cat([torch.from_numpy(places[:-1]) for places in layout.places])
    scores = Policy(model, temperature=0.7)(
        torch.from_numpy(layout.ids)[None],
        torch.from_numpy(layout.positions)[None],
        Packing.of(layout.lengths, at.device, layout.parents),
        at=at,
        targets=torch.cat([sequence[1:] for sequence in sequences]),
    )
    return scores.logprobs, len(layout.ids)


@pytest.mark.parametrize("name", MODELS)
def test_a_shared_prefix_changes_neither_value_nor_gradient(name: str) -> None:
    torch.manual_seed(5)
    prompt = torch.randint(61, (7,))
    sequences = [torch.cat([prompt, torch.randint(61, (length,))]) for length in (4, 1, 6)]
    weights = torch.randn(sum(map(len, sequences)) - len(sequences))
    results = []
    for way in (lambda model: shared(model, sequences)[0], lambda model: alone(model, sequences)):
        model = made(name)
        logprobs = way(model)
        (logprobs * weights).sum().backward()
        results.append((logprobs.detach(), {key: p.grad for key, p in model.named_parameters()}))
    (logprobs, gradients), (expected, expected_gradients) = results
    torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=1e-6)
    for key, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[key], gradient, atol=5e-6, rtol=1e-5)
    assert shared(made(name), sequences)[1] == sum(map(len, sequences)) - 2 * len(prompt)


def test_a_layer_with_a_sliding_window_sees_no_further_back() -> None:
    torch.manual_seed(5)
    prompt = torch.randint(61, (7,))
    sequences = [torch.cat([prompt, torch.randint(61, (length,))]) for length in (4, 1, 6)]
    expected = alone(made("qwen3 window"), sequences)
    torch.testing.assert_close(packed(made("qwen3 window"), sequences), expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(shared(made("qwen3 window"), sequences)[0], expected, atol=1e-6, rtol=1e-6)
    assert (alone(made("qwen3 full"), sequences) - expected).abs().max() > 1e-4


STRUCTURES = {
    "sequences": ([70, 130, 40, 300, 5, 129], [-1] * 6),
    "one sequence": ([513], [-1]),
    "whole blocks": ([256, 256, 128], [-1, 0, 0]),
    "prefixes": ([70, 130, 40, 400, 5, 300], [-1, 0, 0, -1, 3, 3]),
}


def dense(lengths: list[int], parents: list[int], window: int | None) -> Tensor:
    """Which token sees which, pair by pair."""
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    before = torch.tensor([0 if parent == NO_PARENT else lengths[parent] for parent in parents])[segments]
    within = torch.cat([torch.arange(length) for length in lengths])
    positions = before + within
    parent = torch.tensor(parents)[segments]
    own = (segments[:, None] == segments) & (within[:, None] >= within)
    seen = own | (parent[:, None] == segments)
    return seen if window is None else seen & (positions[:, None] - positions < window)


@pytest.mark.parametrize("name", STRUCTURES)
def test_blocks_that_are_skipped_or_taken_whole_are_so_in_truth(name: str) -> None:
    lengths, parents = STRUCTURES[name]
    some, whole = block_structure(lengths, parents, 128)
    seen = dense(lengths, parents, None)
    assert not (some & whole).any()
    for query, key in np.ndindex(some.shape):
        tile = seen[128 * query : 128 * query + 128, 128 * key : 128 * key + 128]
        assert bool(tile.any()) == bool(some[query, key] or whole[query, key])
        assert not whole[query, key] or bool(tile.all())
    if name == "whole blocks":
        assert whole.sum() == 1 + 3 + 2 + 2


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 50, 10_000])
@pytest.mark.parametrize("name", STRUCTURES)
def test_both_layouts_attend_to_the_same_tokens(name: str, window: int | None) -> None:
    lengths, parents = STRUCTURES[name]
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, sum(lengths), 16) for heads in (4, 2, 2))
    mask = dense(lengths, parents, window)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
    for layout in (Padded, Blocks):
        output = layout.of(lengths, parents, query.device).attend(
            query, key, value, scale=None, dropout=0.0, window=window
        )
        torch.testing.assert_close(output, expected, atol=2e-6, rtol=1e-5)


def test_gpus_get_blocks_and_their_kernel_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(attention, "_on", lambda device, array: torch.from_numpy(array))
    monkeypatch.setattr(torch, "compile", lambda kernel: calls.append(kernel.__name__) or kernel)
    packing = Packing.of([3, 2], torch.device("cuda"))
    assert isinstance(packing.layout, Blocks)
    attention._flex_attention.cache_clear()
    first, second = (attention._flex_attention(compiled=True) for _ in range(2))
    attention._flex_attention.cache_clear()
    assert first is second and calls == ["flex_attention"]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"s_aux": torch.zeros(2)}, "attention sinks"),
        ({"softcap": 30.0}, r"soft-capped attention scores \(softcap 30"),
        ({"attention_mask": torch.zeros(1, 1, 5, 5)}, "an attention mask of its own"),
    ],
)
def test_attention_that_packed_sequences_lack_is_refused(part: dict[str, Any], message: str) -> None:
    heads = torch.zeros(1, 2, 5, 4)
    arguments = {"attention_mask": None, "packing": Packing.of([5], heads.device)} | part
    with pytest.raises(AttentionError, match=f"Identity has {message}"):
        packed_attention(torch.nn.Identity(), heads, heads, heads, **arguments)


def test_blocks_refuse_dropout() -> None:
    heads = torch.zeros(1, 2, 5, 16)
    with pytest.raises(AttentionError, match="dropout is 0.1"):
        Blocks.of([5], [NO_PARENT], heads.device).attend(heads, heads, heads, scale=None, dropout=0.1, window=None)
