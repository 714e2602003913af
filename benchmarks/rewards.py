"""Scoring of many slow groups at once, against the time of one group: they should cost about the same."""

from __future__ import annotations

import time
from typing import Any

from grpo_core.config import RewardFunction, RewardsConfig
from grpo_core.rollout.rewards import RewardWorkers

GROUPS, SECONDS = 32, 1.0


def slow(completions: list[Any], **columns: Any) -> list[float]:
    """A judge that takes its time."""
    time.sleep(SECONDS)
    return [1.0] * len(completions)


def measure() -> list[dict[str, float | str]]:
    """Seconds for all groups at once and for one alone, with warm workers."""
    group: dict[str, Any] = {"prompts": [[]] * 8, "completions": [[]] * 8, "completion_ids": [[1]] * 8, "columns": {}}
    with RewardWorkers(RewardsConfig(functions=(RewardFunction(function="benchmarks.rewards:slow"),))) as workers:
        workers.check()
        began = time.monotonic()
        workers.score(**group)
        one = time.monotonic()
        for future in [workers.submit(**group) for _ in range(GROUPS)]:
            future.result()
        ended = time.monotonic()
    case = f"{GROUPS} groups with a reward of {SECONDS:g} s, beside one group"
    return [{"case": case, "ours": ended - one, "theirs": one - began, "unit": "s"}]
