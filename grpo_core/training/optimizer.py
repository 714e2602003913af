"""AdamW and its learning-rate schedule."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from grpo_core.config import OptimizerConfig


def make_optimizer(policy: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the parameters that are trained; vectors and scalars (norms, biases) do not decay.

    One fused kernel updates them all, on GPUs and CPUs alike.
    """
    trained = [p for p in policy.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2]
    vectors = [p for p in trained if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def learning_rate(step: int, total: int, config: OptimizerConfig) -> float:
    """Learning rate of optimizer step `step` (from 0) of `total`: linear warm-up, then the schedule down to zero."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, total - config.warmup_steps)
    match config.schedule:
        case "constant":
            return config.learning_rate
        case "linear":
            return config.learning_rate * max(0.0, 1.0 - done)
        case "cosine":
            return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
