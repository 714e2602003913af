"""What tests on real engines share: weights that differ visibly, and what the trainer would say about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from grpo_core.refit.canary import Canary, canary_tokens
from grpo_core.refit.coordinator import RefitSettings
from grpo_core.refit.source import gather

SETTINGS = RefitSettings(
    connect_seconds=60,
    pause_seconds=60,
    start_seconds=60,
    transfer_seconds=60,
    finish_seconds=60,
    resume_seconds=60,
    canary_seconds=120,
    pause_mode="keep",
    clear_cache=True,
    digests=True,
)


@dataclass(frozen=True)
class Sampling:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def weights_of(model: Any) -> list[tuple[str, torch.Tensor]]:
    return gather(model, dtype=torch.float32, device="cpu", keep=True)


def randomise(model: Any, seed: int) -> None:
    """Weights with a distribution far from uniform, so that a wrong tensor shows in the log-probs."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            parameter.copy_(0.2 * noise if parameter.dim() > 1 else 1 + 0.1 * noise)


def logprobs_of(model: Any, ids: list[int]) -> list[float]:
    """Log-probs (nats) of `ids[1:]` by the model itself, in one forward pass."""
    with torch.no_grad():
        table = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), dim=-1)
    return [float(table[position, token]) for position, token in enumerate(ids[1:])]


def canary_of(model: Any) -> Canary:
    ids = canary_tokens([[(7 * i) % 128 for i in range(64)]], context=2048)
    return Canary(ids, tuple(logprobs_of(model, list(ids))), tolerance=1e-4)
