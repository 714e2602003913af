"""Tiny mixtures of experts, made on the spot. They differ in how memory and checkpoint name and hold the experts."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig, MixtralConfig, OlmoeConfig, Qwen3MoeConfig

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, head_dim=16, moe_intermediate_size=16, num_experts=4),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "olmoe": OlmoeConfig(**SIZES, num_experts=4),
    # Its first layer is dense, and its routers have a bias that is no parameter.
    "glm4_moe": Glm4MoeConfig(**SIZES, moe_intermediate_size=16, n_routed_experts=4, head_dim=16),
}


def make(directory: Path, family: str = "qwen3_moe") -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[family]).save_pretrained(directory)
    return directory
