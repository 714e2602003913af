"""How loaded an engine is, by its own account, and how many requests it should be given. Pure.

An engine that is given more requests than its key-value cache can hold evicts some and reads their tokens again later:
past that knee more requests make it slower. Where the knee lies depends on how long the requests grow, which nobody
knows beforehand; so there is no limit until the first sign of it, and then the limit follows the measured share of the
cache that one request takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# Share of the cache that may be in use: requests that run will still grow.
TARGET_USAGE = 0.85
# Above this, with requests waiting, the cache is what they wait for.
FULL_USAGE = 0.95
# Below this the limit, if it is what holds requests back, is raised by its sixteenth.
LOW_USAGE = 0.7
GROWTH = 1 / 16


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One look at an engine. Totals count from its start; `kv_usage` is the used share of its key-value cache."""

    running: float
    waiting: float
    kv_usage: float
    prefix_queries: float
    prefix_hits: float
    preemptions: float
    generation_tokens: float

    @classmethod
    def of(cls, metrics: Mapping[str, float]) -> EngineLoad:
        """From `engine.parse_metrics`; what an engine does not report is 0."""
        return cls(**{name: metrics.get(name, 0.0) for name in cls.__dataclass_fields__})


def next_limit(limit: int | None, now: EngineLoad, before: EngineLoad, *, in_flight: int, least: int) -> int | None:
    """The most requests an engine should have, after a look at it; None: as many as there are.

    `in_flight` are ours there, `least` is the size of the largest indivisible batch of requests.
    """
    # A refit that clears the cache evicts every running request too, and says nothing of how full the cache is.
    evicted = now.preemptions > before.preemptions and now.kv_usage >= LOW_USAGE
    if evicted or (now.kv_usage >= FULL_USAGE and now.waiting > 0):
        holds = now.running * TARGET_USAGE / now.kv_usage if now.kv_usage > 0 else now.running
        return max(least, int(holds if limit is None else min(limit, holds)))
    if limit is not None and now.kv_usage < LOW_USAGE and now.waiting == 0 and in_flight >= limit * (1 - GROWTH):
        return limit + max(1, int(limit * GROWTH))
    return limit


def pool_metrics(looks: Iterable[tuple[EngineLoad, EngineLoad]]) -> dict[str, float]:
    """The pool's numbers from (now, before) of each engine: sums of requests and evictions, the fullest cache, the
    share of prompt tokens that were found in a cache since the look before; that last one only when there were any."""
    looks = list(looks)
    if not looks:
        return {}
    queries = sum(now.prefix_queries - before.prefix_queries for now, before in looks)
    hits = sum(now.prefix_hits - before.prefix_hits for now, before in looks)
    metrics = {
        "pool/running": sum(now.running for now, _ in looks),
        "pool/waiting": sum(now.waiting for now, _ in looks),
        "pool/kv_usage": max(now.kv_usage for now, _ in looks),
        "pool/preemptions": sum(now.preemptions - before.preemptions for now, before in looks),
    }
    return metrics | ({"pool/prefix_hit_rate": hits / queries} if queries > 0 else {})
