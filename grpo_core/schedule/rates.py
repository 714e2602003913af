"""The speeds that a plan rests on: assumed, given by hand, or taken from what a run did.

An engine is described by two numbers, the tokens per second of a lone sequence and those of the whole engine when it is
full; in between a sequence slows down as far as the total demands (`pool_model`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_core.config import LocalPool, RunConfig
from grpo_core.schedule.workload import Lengths, LogNormal, Observed

# Tokens per second where nothing is known, by device: of one full engine, and of one rank that trains. Orders of
# magnitude of a 7B model on one H200, and of a toy model on one CPU core.
ASSUMED_ENGINE = {"cuda": 10_000.0, "cpu": 1_000.0}
ASSUMED_RANK = {"cuda": 8_000.0, "cpu": 2_000.0}
# A lone sequence is faster than one in a full engine by about this factor, while memory bandwidth is the limit.
ALONE = 3.0
# Answers use a part of what they may, and their lengths spread by about this much in the logarithm.
ASSUMED_SHARE = 0.4
ASSUMED_SIGMA = 1.0
# What was reached in the busiest tenth of the time is what an engine can do.
BUSIEST = 0.9


@dataclass(frozen=True, slots=True)
class Rates:
    """Speeds in tokens per second, times in seconds. `assumed` names those that nobody measured or gave."""

    sequence_tokens_per_second: float
    engine_tokens_per_second: float
    step_seconds: float
    refit_seconds: float
    lengths: Lengths
    assumed: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As `forebay plan --json` shows them."""
        return {
            "sequence_tokens_per_second": self.sequence_tokens_per_second,
            "engine_tokens_per_second": self.engine_tokens_per_second,
            "step_seconds": self.step_seconds,
            "refit_seconds": self.refit_seconds,
            "mean_length": self.lengths.mean,
            "assumed": list(self.assumed),
        }


@dataclass(frozen=True, slots=True)
class Served:
    """One request as an engine served it: `lengths` are the tokens of its siblings, `seconds` from its submission to
    its end, which was at `finished_at`."""

    engine: str
    lengths: tuple[int, ...]
    seconds: float
    finished_at: float


@dataclass(frozen=True, slots=True)
class Given:
    """What somebody knows better. `tokens_per_second` is that of one full engine, `sigma` as in `LogNormal`."""

    tokens_per_second: float | None = None
    step_seconds: float | None = None
    mean_length: float | None = None
    sigma: float | None = None


def rates_of(config: RunConfig, given: Given, measured: Rates | None = None) -> Rates:
    """What was given, else what was measured, else an order of magnitude, which `assumed` then names."""
    assumed = []

    def known(name: str, value: float | None, found: float | None, otherwise: float) -> float:
        if value is None and found is None:
            assumed.append(name)
        return next(number for number in (value, found, otherwise) if number is not None)

    limit = float(config.generation.max_completion_length)
    rollouts = config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt
    ranks = config.training.ranks * config.training.nodes
    device = config.training.device
    engines_on = config.pool.device if isinstance(config.pool, LocalPool) else device
    lengths: Lengths
    if measured is not None and given.mean_length is None and given.sigma is None:
        lengths = measured.lengths
    else:
        found = None if measured is None else measured.lengths.mean
        mean = known("mean length", given.mean_length, found, max(1.0, ASSUMED_SHARE * limit))
        lengths = LogNormal(mean, known("sigma", given.sigma, None, ASSUMED_SIGMA), limit)
    engine = known(
        "tokens per second",
        given.tokens_per_second,
        None if measured is None else measured.engine_tokens_per_second,
        ASSUMED_ENGINE[engines_on],
    )
    step = known(
        "step seconds",
        given.step_seconds,
        None if measured is None else measured.step_seconds,
        rollouts * lengths.mean / (ASSUMED_RANK[device] * ranks),
    )
    alone = ALONE * engine / slots_of(config)
    if measured is not None and given.tokens_per_second is None:
        alone = measured.sequence_tokens_per_second
    return Rates(
        sequence_tokens_per_second=min(alone, engine),
        engine_tokens_per_second=engine,
        step_seconds=step,
        refit_seconds=0.0 if measured is None else measured.refit_seconds,
        lengths=lengths,
        assumed=tuple(assumed),
    )


def slots_of(config: RunConfig) -> int:
    """Sequences that one engine decodes at once; of engines that others run, what ours would take."""
    return config.pool.max_num_seqs if isinstance(config.pool, LocalPool) else LocalPool().max_num_seqs


def observed_rates(served: Sequence[Served], *, step_seconds: Sequence[float], refit_seconds: Sequence[float]) -> Rates:
    """The rates of a run, from requests that its engines served and from the seconds of its steps and refits.

    A sequence's own speed is that of the longest sibling; an engine's is what it made while a request was in it, all
    requests of that time together, each spread evenly over its own time. Of both, what the busiest tenth reached.
    """
    alone = [max(request.lengths) / request.seconds for request in served]
    totals = np.concatenate(
        [_throughput([request for request in served if request.engine == name]) for name in {r.engine for r in served}]
    )
    engine = float(np.quantile(totals, BUSIEST))
    return Rates(
        sequence_tokens_per_second=min(engine, float(np.quantile(alone, BUSIEST))),
        engine_tokens_per_second=engine,
        step_seconds=float(np.median(step_seconds)),
        refit_seconds=float(np.median(refit_seconds)) if refit_seconds else 0.0,
        lengths=Observed(tuple(float(length) for request in served for length in request.lengths)),
    )


def _throughput(served: Sequence[Served]) -> np.ndarray:
    """Tokens per second [requests] that one engine made during each of its requests."""
    end = np.array([request.finished_at for request in served])
    seconds = np.array([request.seconds for request in served])
    tokens = np.array([sum(request.lengths) for request in served], dtype=np.float64)
    start = end - seconds
    overlap = np.minimum(end[:, None], end[None, :]) - np.maximum(start[:, None], start[None, :])
    return (np.maximum(overlap, 0.0) * (tokens / seconds)[None, :]).sum(axis=1) / seconds
