"""The ledger says of every group what was decided, and the metrics of a step count each trained token once."""

from __future__ import annotations

import numpy as np

from grpo_core.metrics import reported
from grpo_core.objective.losses import Denominators
from grpo_core.schedule.admission import Admission
from grpo_core.training.accounts import Decisions, step_rows
from grpo_core.training.batch import Row
from grpo_core.training.feed import BufferedGroup
from grpo_core.training.step import Place, StepPlan, StepResult
from grpo_core.trajectory import VersionSpan
from storage.layout import PartName


def group(ordinal: int, rollouts: tuple[int, ...] = (0, 1), rewards: tuple[float, ...] = (0.0, 1.0)) -> BufferedGroup:
    return BufferedGroup(
        ordinal, PartName(1, 2, 3), tuple(range(len(rollouts))), rollouts, rewards, 0, 4, 0, ordinal, None, False
    )


def row(*versions: int) -> Row:
    """One prompt token, then one generated token per version."""
    length = 1 + len(versions)
    spans = tuple(VersionSpan(1, version, place, place + 1) for place, version in enumerate(versions, start=1))
    return Row(np.zeros(length, np.int32), np.arange(length) > 0, np.zeros(length, np.float32), spans)


def test_a_rollout_of_several_sequences_has_one_advantage_and_all_its_tokens() -> None:
    groups = [group(7, rollouts=(0, 0, 1)), group(8)]
    rows = [row(4), row(4, 3), row(1), row(4), row(2, 2)]
    places = [Place("part", index) for index in range(5)]
    plan = StepPlan(5, places, [-1.0, -1.0, 1.0, 0.5, -0.5], [[[0, 1, 2, 3, 4]]], 2, Denominators(6.0, 4.0), 0.1)
    logprobs = {index: np.full(int(each.generated.sum()), -0.5) for index, each in enumerate(rows)}
    result = StepResult(0.25, 1.0, {"kl": (3.0, 6.0), "kl_reference": (0.0, 0.0)}, 0.1, logprobs)
    account = step_rows(
        plan, groups, rows, result, version=4, logprobs=True, given_up=Decisions(), token_budget=8, taken_at=0.0
    )
    first, second = account.rows
    assert first["advantages"] == [-1.0, 1.0] and second["advantages"] == [0.5, -0.5]
    assert (first["tokens_generated"], first["tokens_trained"], first["tokens_masked"]) == (4, 3, 1)
    assert first["trainer_logprobs"] == [[-0.5], [-0.5, -0.5], [-0.5]]
    assert (first["lease_attempt"], first["lease"], first["part"], first["state"]) == (1, 2, 3, "trained")
    assert (second["lag_mean"], second["lag_max"]) == (4 / 3, 2)
    assert account.lag_tokens == {0: 3, 1: 1, 2: 2}
    assert reported(account.measures)["kl"] == 0.5 and "kl_reference" not in reported(account.measures)
    assert reported(account.measures)["trained_tokens"] == 6.0
    assert reported(account.measures)["masked_token_share"] == 1 / 7
    assert (
        step_rows(
            plan, groups, rows, result, version=4, logprobs=False, given_up=Decisions(), token_budget=8, taken_at=0.0
        ).rows[0]["trainer_logprobs"]
        is None
    )


def test_a_group_that_is_all_stale_has_no_lag() -> None:
    plan = StepPlan(9, [Place("part", 0), Place("part", 1)], [0.0, 0.0], [[[0, 1]]], 8, Denominators(0.0, 0.0), 0.1)
    account = step_rows(
        plan,
        [group(7)],
        [row(1), row(2)],
        StepResult(0, 0, {}, 0, {}),
        version=9,
        logprobs=True,
        given_up=Decisions(),
        token_budget=8,
        taken_at=0.0,
    )
    assert (account.rows[0]["lag_mean"], account.rows[0]["lag_max"], account.rows[0]["tokens_trained"]) == (
        None,
        None,
        0,
    )
    assert reported(account.measures)["masked_token_share"] == 1.0


def test_a_first_token_that_was_generated_is_no_trained_one() -> None:
    spans = (VersionSpan(1, 4, 0, 3),)
    promptless = Row(np.zeros(3, np.int32), np.ones(3, bool), np.zeros(3, np.float32), spans)
    plan = StepPlan(4, [Place("part", 0), Place("part", 1)], [0.0, 0.0], [[[0, 1]]], 0, Denominators(4.0, 2.0), 0.1)
    result = StepResult(0, 0, {}, 0, {})
    account = step_rows(
        plan,
        [group(7)],
        [promptless, row(4, 4)],
        result,
        version=4,
        logprobs=False,
        given_up=Decisions(),
        token_budget=8,
        taken_at=0.0,
    )
    assert (account.rows[0]["tokens_generated"], account.rows[0]["tokens_trained"]) == (5, 4)
    assert account.lag_tokens == {0: 4}


def test_decisions_add_up_and_are_due_from_the_first_of_them() -> None:
    groups = {ordinal: group(ordinal) for ordinal in range(4)}
    none = Decisions()
    assert not none and not none.due(1e9, 0.0)
    first = none.with_admission(Admission((), {1: "stale"}, {0: "failed"}, 0), groups, at=10.0)
    both = first.with_admission(Admission((), {}, {2: "failed", 3: "other"}, 0), groups, at=50.0)
    assert both.with_admission(Admission((), {}, {}, 0), groups, at=99.0) == both
    assert not both.due(11.9, 2.0) and both.due(12.0, 2.0)
    assert both.returned_ordinals() == [1]
    assert both.dropped_by_reason() == {"failed": [0, 2], "other": [3]}
    assert [(row["ordinal"], row["state"], row["reason"]) for row in both.rows()] == [
        (0, "dropped", "failed"),
        (2, "dropped", "failed"),
        (3, "dropped", "other"),
        (1, "returned", "stale"),
    ]


def test_time_does_not_run_while_nothing_is_decided() -> None:
    still_none = Decisions().with_admission(Admission((), {}, {}, 0), {}, at=1.0)
    later = still_none.with_admission(Admission((), {}, {0: "failed"}, 0), {0: group(0)}, at=100.0)
    assert not later.due(101.0, 2.0)
