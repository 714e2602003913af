"""The arithmetic of a model is what its matrices multiply."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from grpo_core.config import LoRAConfig
from grpo_core.training.flops import ModelShape, forward_flops, peak_flops, step_flops, utilisation
from grpo_core.training.lora import adapter_weights, add_adapters

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
CONFIGS = {
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_forward_pass_is_what_torch_counts(name: str) -> None:
    config, tokens = CONFIGS[name], 24
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, tokens, dtype=torch.int64), use_cache=False)
    shape = ModelShape.of(config)
    unseen = 2 * (tokens * tokens - tokens * (tokens + 1) // 2) * shape.per_pair  # eager attention masks, not skips
    rotary = 2 * tokens * shape.head_width // 2
    counted = counter.get_total_flops() - unseen
    assert counted == pytest.approx(forward_flops(shape, [tokens], tokens), abs=rotary)


def test_attention_is_that_of_each_sequence() -> None:
    shape = ModelShape.of(CONFIGS["qwen3"])
    apart = forward_flops(shape, [10, 20], 0)
    assert apart == forward_flops(shape, [10], 0) + forward_flops(shape, [20], 0)
    assert forward_flops(shape, [30], 0) - apart == 2 * 10 * 20 * shape.per_pair


def test_experts_count_as_many_as_a_token_visits() -> None:
    dense = {**SIZES, "intermediate_size": 2 * 8}
    sparse = Qwen3MoeConfig(**SIZES, head_dim=16, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=8)
    more = ModelShape.of(sparse).per_token - ModelShape.of(Qwen3Config(**dense, head_dim=16)).per_token
    assert more == 3 * 32 * 16  # the routers


def test_width_of_heads_may_be_left_to_the_model() -> None:
    plain = PreTrainedConfig(**{name: value for name, value in SIZES.items() if name != "num_key_value_heads"})
    shape = ModelShape.of(plain)
    assert (shape.kv_heads, shape.head_width) == (4, 8)


def test_a_step_is_three_forward_passes_and_what_is_scored() -> None:
    shape = ModelShape.of(CONFIGS["qwen3"])
    assert step_flops(shape, [9], 4) == 3 * forward_flops(shape, [9], 4)
    assert step_flops(shape, [9], 4, scored=1.5) == 4.5 * forward_flops(shape, [9], 4)


def test_a_step_of_adapters_is_what_torch_counts() -> None:
    config, tokens = CONFIGS["qwen3"], 24
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    add_adapters(model, LoRAConfig(rank=2), seed=0)
    shape = ModelShape.of(config, adapters=adapter_weights(model))
    # The first layer's input needs a gradient, as that of every other layer does.
    model.enable_input_require_grads()
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, tokens, dtype=torch.int64), use_cache=False).logits.sum().backward()
    unseen = 3 * 2 * (tokens * tokens - tokens * (tokens + 1) // 2) * shape.per_pair
    rotary = 3 * 2 * tokens * shape.head_width // 2
    assert counter.get_total_flops() - unseen == pytest.approx(step_flops(shape, [tokens], tokens), abs=rotary)


def test_both_denominators() -> None:
    found = utilisation(4e12, wall_seconds=4.0, busy_seconds=2.0, peak_flops=1e12, devices=2)
    assert (found.of_wall, found.of_busy) == (0.5, 1.0)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("CPU", None),
    ],
)
def test_peaks_by_name(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak
