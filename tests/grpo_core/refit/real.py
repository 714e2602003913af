"""What tests on real engines share: weights that differ visibly, and what the trainer would say about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import requests
import torch

from grpo_core.refit.canary import Canary, canary_tokens
from grpo_core.refit.coordinator import RefitResult, RefitSettings
from grpo_core.refit.source import gather
from grpo_core.rollout.engine import parse_metrics
from tests.vllm_engine import RunningEngine

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


# The first refits find their size: buffers, threads, caches.
REFITS, WARM = 50, 10


def refit_fifty_times(
    models: Mapping[str, Any], engines: Mapping[str, RunningEngine], refit: Callable[[str, int], RefitResult]
) -> None:
    """Exact every time, and no process keeps a copy of the weights each time, neither the engines' nor this one."""

    def memory() -> dict[str, int]:
        own = {"trainer": psutil.Process().memory_info().rss}
        return own | {name: engine.memory() for name, engine in engines.items()}

    before: dict[str, int] = {}
    for version in range(REFITS):
        if version == WARM:
            before = memory()
        for name, model in models.items():
            randomise(model, seed=100 + version)
            assert refit(name, version).canary[name] <= 1e-4
    sizes = {name: sum(tensor.nbytes for _, tensor in weights_of(model)) for name, model in models.items()}
    sizes["trainer"] = sum(sizes.values())
    grown = {name: bytes_ - before[name] for name, bytes_ in memory().items()}
    # A copy left behind by each refit would be forty of them.
    assert {name: growth for name, growth in grown.items() if growth >= 10 * sizes[name]} == {}


def load_of(engine: RunningEngine) -> dict[str, float]:
    """What the engine says of its load and its totals."""
    return parse_metrics(requests.get(f"{engine.url}/metrics", timeout=10).text)


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
