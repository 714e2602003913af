"""There is no limit until an engine shows the knee of its cache, and then the limit follows it both ways."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_core.rollout.load import EngineLoad, next_limit, pool_metrics

CALM = EngineLoad(
    running=40, waiting=0, kv_usage=0.5, prefix_queries=100, prefix_hits=20, preemptions=0, generation_tokens=0
)
FULL = replace(CALM, running=100, waiting=30, kv_usage=1.0)
EVICTING = replace(CALM, running=100, kv_usage=0.9, preemptions=2)


@pytest.mark.parametrize(
    ("limit", "now", "in_flight", "expected"),
    [
        (None, CALM, 500, None),
        (None, replace(FULL, waiting=0), 500, None),
        (None, replace(FULL, kv_usage=0.9), 500, None),
        (None, FULL, 130, 85),
        (None, EVICTING, 100, 94),
        (85, EVICTING, 85, 85),
        (64, FULL, 64, 64),
        (200, FULL, 200, 85),
        (64, CALM, 64, 68),
        (64, CALM, 61, 68),
        (64, CALM, 30, 64),
        (64, replace(CALM, waiting=1), 64, 64),
        (64, replace(CALM, kv_usage=0.8), 64, 64),
        (4, CALM, 4, 5),
    ],
)
def test_the_limit_follows_the_knee(limit: int | None, now: EngineLoad, in_flight: int, expected: int | None) -> None:
    assert next_limit(limit, now, CALM, in_flight=in_flight, least=1) == expected


def test_one_group_always_fits() -> None:
    tight = replace(FULL, running=2)
    assert next_limit(None, tight, CALM, in_flight=8, least=8) == 8


def test_evictions_of_the_past_are_no_sign() -> None:
    assert next_limit(None, EVICTING, EVICTING, in_flight=100, least=1) is None


def test_a_run_settles_where_the_cache_holds_its_requests() -> None:
    """Requests that take a hundredth of the cache each, as many as are allowed of a thousand."""
    limit, before = None, CALM
    seen = []
    for _ in range(100):
        asked = min(1000, limit or 1000)
        running = min(asked, 100)
        now = replace(CALM, running=running, waiting=asked - running, kv_usage=running / 100)
        limit, before = next_limit(limit, now, before, in_flight=asked, least=1), now
        seen.append(running)
    assert 65 <= min(seen[10:]) <= max(seen[10:]) <= 100


def test_metrics_of_the_pool_are_sums_and_the_worst() -> None:
    other = replace(CALM, kv_usage=0.9, waiting=3, preemptions=5, prefix_queries=400, prefix_hits=170)
    assert pool_metrics([]) == {}
    assert pool_metrics([(CALM, CALM)]) == {
        "pool/running": 40,
        "pool/waiting": 0,
        "pool/kv_usage": 0.5,
        "pool/preemptions": 0,
    }
    assert pool_metrics([(CALM, CALM), (other, CALM)]) == {
        "pool/running": 80,
        "pool/waiting": 3,
        "pool/kv_usage": 0.9,
        "pool/preemptions": 5,
        "pool/prefix_hit_rate": 0.5,
    }


def test_what_an_engine_does_not_report_is_zero() -> None:
    assert EngineLoad.of({"running": 3.0, "unknown": 1.0}) == EngineLoad(3, 0, 0, 0, 0, 0, 0)


def test_what_a_refit_evicted_from_an_empty_cache_is_no_sign() -> None:
    """A refit that clears the cache evicts whatever runs, and at the next look little may be running."""
    refitted = replace(CALM, running=1, kv_usage=0.02, preemptions=40)
    assert next_limit(None, refitted, CALM, in_flight=40, least=8) is None
    assert next_limit(64, refitted, CALM, in_flight=8, least=8) == 64
