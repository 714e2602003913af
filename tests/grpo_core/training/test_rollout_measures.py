"""A rate about rollouts has in its numerator exactly what its denominator counts."""

from __future__ import annotations

from grpo_core.metrics import reported
from grpo_core.training.rollout_measures import cost_measures, rollout_measures
from tests.grpo_core.training.told import facts, group, use


def test_rollouts_are_measured_by_their_facts() -> None:
    groups = [
        group(
            1,
            (5, 5),
            facts(turns=3, joins_clean=1, joins_fork=1, drift_tokens=6, drift_max=6),
            facts(finish_reason="length", finished_at=20.0),
        ),
        group(2, (5, 5), facts(finish_reason="tool_calls", turns=4), facts(finished_at=18.0)),
    ]
    measured = reported(rollout_measures(groups, taken_at=24.0))
    assert (measured["rollout/turns_mean"], measured["rollout/turns_max"], measured["rollout/turns_total"]) == (
        2.25,
        4,
        9,
    )
    assert (measured["rollout/natural_end_share"], measured["rollout/turn_limit_share"]) == (0.5, 0.25)
    assert (measured["rollout/fork_share"], measured["rollout/realign_share"]) == (0.5, 0.0)
    assert (measured["rollout/drift_tokens_mean"], measured["rollout/drift_tokens_max"]) == (3.0, 6)
    assert (measured["rollout/seconds_mean"], measured["rollout/seconds_max"]) == (6.5, 10.0)
    assert measured["rollout/queue_seconds"] == (10 + 4 + 10 + 6) / 4


def test_a_tool_is_measured_by_its_own_calls() -> None:
    """One round of two calls side by side and one of one; a call of a tool that is not there, one that cannot be read,
    and one of the environment's: six calls in four rounds, of which five were ours to answer and three ours to make."""
    made = facts(
        tool_calls=6, tool_rounds=4, tool_failures=3, unknown_tool_calls=1, malformed_tool_calls=1, tool_seconds=3.0,
        tool_usage=[use("search", 2, 3.0, failures=1), use("calculator", 1, 0.5)],
    )  # fmt: skip
    measured = reported(rollout_measures([group(1, (5, 5), made, facts())], taken_at=20.0))
    assert (measured["tools/calls"], measured["tools/calls_mean"], measured["tools/calls_per_round"]) == (6, 3.0, 1.5)
    assert (measured["tools/unknown_calls"], measured["tools/malformed_calls"]) == (1, 1)
    assert (measured["tools/failure_share"], measured["tools/seconds"]) == (3 / 5, 3.5 / 3)
    assert (measured["tool_calls/search"], measured["tool_failures/search"], measured["tool_seconds/search"]) == (
        2,
        1,
        1.5,
    )
    assert (measured["tool_failures/calculator"], measured["tool_seconds/calculator"]) == (0, 0.5)
    assert measured["rollout/tool_seconds"] == 3.0 / 2


def test_generation_is_what_neither_tools_nor_the_environment_took() -> None:
    """Its reset comes before the first request and its reward behind the last answer; only its steps are in between."""
    played = facts(
        finished_at=20.0,
        tool_seconds=1.0,
        environment_usage=[use("reset", 1, 50.0), use("step", 4, 3.0), use("reward", 1, 70.0)],
    )
    untimed = facts(submitted_at=None, finished_at=20.0, tool_seconds=100.0)
    measured = reported(rollout_measures([group(1, (5, 5, 5), played, facts(), untimed)], taken_at=20.0))
    assert measured["rollout/generation_seconds"] == (10 - 1 - 3 + 4) / 2
    assert measured["rollout/queue_seconds"] == (0 + 6) / 2
    assert measured["environment/reset_seconds"] == 50.0 and measured["environment/reward_seconds"] == 70.0
    assert measured["environment/step_seconds"] == 3.0 / 4


def test_what_a_group_cost_counts_once_and_whatever_became_of_it() -> None:
    paid = facts(failed_requests=2, aborted_requests=1, scoring_wait_seconds=0.5, scoring_seconds=2.0)
    tombstone = facts(failed_requests=3, scoring_wait_seconds=None, scoring_seconds=None)
    groups = [group(1, (5, 5), paid, paid), group(2, (0, 0), tombstone), group(3, (5,), facts(scoring_seconds=1.0))]
    assert reported(cost_measures(groups)) == {
        "rollout/failed_requests": 5,
        "rollout/aborted_requests": 1,
        "scoring/wait_seconds": 0.25,
        "scoring/seconds": 1.5,
    }


def test_what_no_shard_says_is_left_out() -> None:
    assert rollout_measures([group(1, (5,))], taken_at=0.0) == {}
    assert reported(cost_measures([group(1, (5,))])) == {"rollout/failed_requests": 0, "rollout/aborted_requests": 0}
    silent = dict.fromkeys(facts()) | {"finish_reason": "stop", "turns": 1, "tool_calls": 0, "tool_failures": 0}
    untimed = reported(rollout_measures([group(1, (5,), silent)], taken_at=0.0))
    assert not any("seconds" in name for name in untimed if name != "rollout/tool_seconds")
    assert "tools/failure_share" not in untimed and "tools/calls_per_round" not in untimed
