"""A plan keeps groups whole, spreads them over updates, and divides by what the whole step trains."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from grpo_core.config import RunConfig
from grpo_core.objective.losses import Denominators
from grpo_core.training.batch import Row
from grpo_core.training.feed import BufferedGroup
from grpo_core.training.planning import SequenceTooLong, TrainedGroup, plan_step, step_credit
from grpo_core.training.step import FILLER, Place, StepPlan
from grpo_core.trajectory import VersionSpan
from storage.layout import PartName


def row(length: int, version: int, first: int = 0) -> Row:
    generated = np.arange(length) >= 2
    ids = np.where(generated, 50 + np.arange(length), first).astype(np.int32)
    return Row(ids, generated, np.zeros(length, np.float32), (VersionSpan(1, version, 2, length),))


def group(ordinal: int, *lengths: int, version: int = 5, rewards: tuple[float, ...] | None = None) -> TrainedGroup:
    return TrainedGroup(
        ordinal,
        [Place(f"part-{ordinal}", number) for number in range(len(lengths))],
        [row(length, version, first=ordinal) for length in lengths],
        [float(ordinal)] * len(lengths),
        [True] * len(lengths),
        [reward > 0 for reward in rewards or (1.0,) * len(lengths)],
    )


def plan(*groups: TrainedGroup, **changes: Any) -> StepPlan:
    settings: dict[str, Any] = {
        "ranks": 1,
        "token_budget": 20,
        "share_prefixes": True,
        "minibatches": 1,
        "version": 6,
        "oldest_version": 5,
        "max_completion_length": 100,
        "learning_rate": 0.5,
    }
    return plan_step(3, groups, **(settings | changes))


def of_updates(made: StepPlan) -> list[set[int]]:
    """The groups that each update trains."""
    return [
        {made.groups[i] for number in numbers for part in made.micro_batches[number] for i in part}
        for numbers in made.micro_batches_by_update()
    ]


def test_denominators_are_those_of_the_whole_step() -> None:
    made = plan(group(7, 5, 8), group(8, 6, version=4), group(9, 3, rewards=(float("nan"),)), minibatches=3)
    assert made.denominators == Denominators(tokens=10.0, sequences=3.0, constant=300.0, positive_tokens=9.0)
    assert made.positive == [True, True, True, False]
    assert made.advantages == [7.0, 7.0, 8.0, 9.0]
    assert (made.step, made.version, made.oldest_version, made.learning_rate) == (3, 6, 5, 0.5)


def test_updates_take_the_groups_in_order_and_whole() -> None:
    groups = [group(ordinal, 9, 9, 9) for ordinal in range(5)]
    made = plan(*groups, minibatches=2)
    assert of_updates(made) == [{0, 1, 2}, {3, 4}]
    placed = sorted(i for micro_batch in made.micro_batches for part in micro_batch for i in part)
    assert placed == list(range(15))


def test_one_update_takes_everything() -> None:
    made = plan(group(1, 9, 9), group(2, 9, 9))
    assert of_updates(made) == [{0, 1}]
    assert dataclasses.replace(made, updates=()).micro_batches_by_update() == made.micro_batches_by_update()


def test_more_updates_than_groups_are_as_many_as_groups() -> None:
    assert len(plan(group(1, 5), group(2, 5), minibatches=4).updates) == 2


def test_fillers_come_behind_the_sequences_of_all_updates() -> None:
    made = plan(group(1, 5), group(2, 5), minibatches=2, ranks=3)
    assert made.places == [Place("part-1", 0), Place("part-2", 0)] + [FILLER] * 4
    assert [sorted(i for part in micro_batch for i in part) for micro_batch in made.micro_batches] == [
        [0, 2, 3],
        [1, 4, 5],
    ]
    assert made.advantages[2:] == [0.0] * 4 and made.positive[2:] == [False] * 4
    assert len(set(made.groups)) == len(made.groups) == 6


def test_prefixes_are_shared_only_when_asked_for() -> None:
    assert plan(group(1, 5, 6)).groups == [0, 0]
    assert plan(group(1, 5, 6), share_prefixes=False).groups == []


def test_a_sequence_that_no_micro_batch_holds_is_named() -> None:
    with pytest.raises(
        SequenceTooLong, match="step 3: a sequence of ordinal 8 has 21 tokens, more than packing.token_budget=20"
    ):
        plan(group(7, 5), group(8, 6, 21), minibatches=2)


def test_credit_counts_the_tokens_of_a_rollout_that_the_window_lets_be_trained() -> None:
    """Rollout 0 forked into 3 + 1 fresh tokens, rollout 1 has 1 fresh one,
    rollout 2 only old ones, rollout 3 failed."""
    config = RunConfig.model_validate(
        {
            "grpo": {
                "num_generations_per_prompt": 4,
                "advantage_whitening": "tokens",
                "advantage_scale": "none",
                "async_grpo": {"max_trajectory_age_steps": 1},
            }
        }
    )
    rows = [row(5, 5), row(3, 6), row(3, 5), row(9, 4)]
    made = BufferedGroup(
        7, PartName(1, 0, 0), (0, 1, 2, 3), (0, 0, 1, 2), (1.0, 0.0, 0.5, float("nan")), 4, 6, 0, 7, None, False,
        lengths=(4, 1, 7, 0), truncated=(False,) * 4,
    )  # fmt: skip
    credit = step_credit([made], [rows], config, oldest_version=5)
    np.testing.assert_array_equal(credit.trained, [[True, True, False, False]])
    # ±½ of 4 and 1 tokens: mean 0.3, spread 0.4.
    np.testing.assert_allclose(credit.advantages, [[0.5, -2.0, 0.0, 0.0]])
