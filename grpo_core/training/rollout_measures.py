"""The metrics of a step that are about its rollouts: how they went, their tools, their environment, and what they cost.

Contract: as in training.measures, from the facts that the shards hold of each rollout, which are None where a shard
does not say. A rate has in its numerator what its denominator counts: the seconds of tools are those of calls that were
made, the times of rollouts those of rollouts whose times are known.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from grpo_core.training.feed import BufferedGroup
from grpo_core.training.measures import Measures, mean, percentile
from grpo_core.trajectory import LENGTH, TOOL_CALLS

Fact = Mapping[str, Any]


def rollout_measures(groups: Sequence[BufferedGroup], *, taken_at: float) -> Measures:
    """How the rollouts of the trained groups went. `taken_at`, in Unix seconds, is when the step took them."""
    facts = [fact for group in groups for fact in group.facts]
    if not facts:
        return {}
    turns = _values(facts, "turns")
    joins = {kind: sum(_values(facts, f"joins_{kind}")) for kind in ("clean", "realign", "fork")}
    joined = sum(joins.values())
    endings = Counter(fact["finish_reason"] for fact in facts)
    count = float(len(facts))
    measures: Measures = {
        "rollout/turns_mean": mean(turns),
        "rollout/turns_p95": percentile(turns, 0.95),
        "rollout/turns_p99": percentile(turns, 0.99),
        "rollout/turns_max": max(turns),
        "rollout/turns_total": sum(turns),
        "rollout/natural_end_share": (count - endings[LENGTH] - endings[TOOL_CALLS], count),
        "rollout/turn_limit_share": (float(endings[TOOL_CALLS]), count),
        "rollout/tool_seconds": (sum(_values(facts, "tool_seconds")), count),
        "rollout/sequences": (float(sum(len(group.rows) for group in groups)), count),
        "rollout/fork_share": (joins["fork"], joined),
        "rollout/realign_share": (joins["realign"], joined),
        "rollout/drift_tokens_mean": (sum(_values(facts, "drift_tokens")), joined),
        "rollout/drift_tokens_max": max(_values(facts, "drift_max"), default=0.0),
    }
    return measures | _time_measures(facts, taken_at) | _tool_measures(facts) | _environment_measures(facts)


def cost_measures(groups: Iterable[BufferedGroup]) -> Measures:
    """What groups cost beside their tokens, whether they are trained or not."""
    facts = [group.facts[0] for group in groups if group.facts]
    return {
        "rollout/failed_requests": sum(_values(facts, "failed_requests")),
        "rollout/aborted_requests": sum(_values(facts, "aborted_requests")),
        "scoring/wait_seconds": mean(_values(facts, "scoring_wait_seconds")),
        "scoring/seconds": mean(_values(facts, "scoring_seconds")),
    }


def _time_measures(facts: Sequence[Fact], taken_at: float) -> Measures:
    """Those of the rollouts whose times are known."""
    timed = [fact for fact in facts if fact["submitted_at"] is not None and fact["finished_at"] is not None]
    if not timed:
        return {}
    seconds = [fact["finished_at"] - fact["submitted_at"] for fact in timed]
    stepping = sum(use["seconds"] for use in _uses(timed, "environment_usage") if use["name"] == "step")
    elsewhere = sum(_values(timed, "tool_seconds")) + stepping
    return {
        "rollout/seconds_mean": mean(seconds),
        "rollout/seconds_p95": percentile(seconds, 0.95),
        "rollout/seconds_max": max(seconds),
        "rollout/generation_seconds": (sum(seconds) - elsewhere, float(len(timed))),
        "rollout/queue_seconds": mean([taken_at - at for at in _values(timed, "finished_at")]),
    }


def _tool_measures(facts: Sequence[Fact]) -> Measures:
    """Calls of tools, by name too. Those of an environment's own tools are calls, but it alone knows how they went."""
    calls, failures, seconds = Counter[str](), Counter[str](), defaultdict[str, float](float)
    for use in _uses(facts, "tool_usage"):
        calls[use["name"]] += use["calls"]
        failures[use["name"]] += use["failures"]
        seconds[use["name"]] += use["seconds"]
    made = _values(facts, "tool_calls")
    unknown, malformed = (sum(_values(facts, f"{kind}_tool_calls")) for kind in ("unknown", "malformed"))
    measures: Measures = {
        "tools/calls": sum(made),
        "tools/calls_mean": mean(made),
        "tools/calls_per_round": (sum(made), sum(_values(facts, "tool_rounds"))),
        "tools/unknown_calls": unknown,
        "tools/malformed_calls": malformed,
        "tools/failure_share": (sum(_values(facts, "tool_failures")), calls.total() + unknown + malformed),
        "tools/seconds": (sum(seconds.values()), float(calls.total())),
    }
    measures |= {f"tool_calls/{name}": float(count) for name, count in calls.items()}
    measures |= {f"tool_failures/{name}": float(failures[name]) for name in calls}
    return measures | {f"tool_seconds/{name}": (seconds[name], float(count)) for name, count in calls.items()}


def _environment_measures(facts: Sequence[Fact]) -> Measures:
    """Times of the environment's calls. A rollout that was begun again has those of its last attempt."""
    calls, seconds = Counter[str](), defaultdict[str, float](float)
    for use in _uses(facts, "environment_usage"):
        calls[use["name"]] += use["calls"]
        seconds[use["name"]] += use["seconds"]
    return {
        "environment/reset_seconds": (seconds["reset"], float(calls["reset"])),
        "environment/step_seconds": (seconds["step"], float(calls["step"])),
        "environment/reward_seconds": (seconds["reward"], float(calls["reward"])),
    }


def _uses(facts: Iterable[Fact], name: str) -> Iterator[Fact]:
    return (use for fact in facts for use in fact[name] or ())


def _values(facts: Iterable[Fact], name: str) -> list[float]:
    return [float(fact[name]) for fact in facts if fact[name] is not None]
