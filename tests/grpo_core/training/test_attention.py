"""A packed row gives every sequence the log-probs and the gradient it has alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from grpo_core.training.attention import NAME, Packing, packed_attention
from grpo_core.training.model import Policy

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
MODELS = {
    "qwen3 grouped": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16)),
    "qwen3 full": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=4, head_dim=8)),
    "llama one key": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1)),
    "llama tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True)),
}
LENGTHS = [5, 1, 9, 3]


def made(name: str) -> PreTrainedModel:
    torch.manual_seed(11)
    return MODELS[name]().float().train()


def packed(model: PreTrainedModel, sequences: list[Tensor]) -> Tensor:
    """Log-prob of every token but the first of each sequence, from one packed row."""
    model.set_attn_implementation(NAME)
    lengths = [len(sequence) for sequence in sequences]
    tokens = torch.cat(sequences)
    first = torch.cumsum(torch.tensor([0, *lengths]), 0)[:-1]
    at = torch.tensor([i for i in range(len(tokens) - 1) if i + 1 not in set(first.tolist())])
    positions = torch.cat([torch.arange(length) for length in lengths])
    logprobs, _ = Policy(model, temperature=0.7)(
        tokens[None], positions[None], Packing.of(lengths, tokens.device), at=at, targets=tokens[at + 1]
    )
    return logprobs


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


def test_a_sequence_beyond_a_sliding_window_is_refused() -> None:
    heads = torch.zeros(1, 2, 5, 4)
    packing = Packing.of([5], heads.device)
    with pytest.raises(NotImplementedError, match="5 tokens exceeds the model's sliding window of 4"):
        packed_attention(torch.nn.Identity(), heads, heads, heads, None, packing=packing, sliding_window=4)
    output, _ = packed_attention(torch.nn.Identity(), heads, heads, heads, None, packing=packing, sliding_window=5)
    assert output.shape == (1, 5, 2, 4)
