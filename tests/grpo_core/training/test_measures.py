"""What a step measures is exact, and says who waited, what was wasted and whether short answers were preferred."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from grpo_core.config import ObjectiveConfig
from grpo_core.metrics import reported
from grpo_core.objective.losses import Denominators
from grpo_core.refit.coordinator import RefitResult
from grpo_core.training.batch import Row
from grpo_core.training.flops import Machine, ModelShape, step_flops
from grpo_core.training.measures import (
    Clock,
    arithmetic_measures,
    clock_measures,
    composition_measures,
    lag_measures,
    length_measures,
    longest_turn,
    percentile,
    refit_measures,
    waste_measures,
    weight_measures,
)
from grpo_core.training.step import FILLER, Place, StepPlan, StepResult
from grpo_core.trajectory import Stamp
from tests.grpo_core.training.told import facts, group

RESULT = StepResult(0.0, 0.0, {"prefix_tokens_saved": (4.0, 24.0)}, 2.0, {}, 2, phases={"forward_seconds": 0.5})


def row(mask: str) -> Row:
    """Tokens: `.` of prompt, template or tool, `x` generated."""
    return Row(
        np.zeros(len(mask), np.int32), np.array([letter == "x" for letter in mask]), np.zeros(len(mask), np.float32), ()
    )


@pytest.mark.parametrize(("mask", "longest"), [("..xx", 2), (".x.xxx.", 3), ("xxxx.x", 4), ("...", 0)])
def test_a_turn_ends_where_a_token_was_not_generated(mask: str, longest: int) -> None:
    assert longest_turn(row(mask)) == longest


def test_lengths_are_those_of_rollouts_whatever_their_sequences() -> None:
    groups = [group(1, (5, 2), facts(prompt_length=2), facts(prompt_length=4), rollouts=(0, 0, 1))]
    measured = reported(length_measures(groups, [row("..xx.x"), row(".xx"), row("....xx..")], trained=6))
    assert (
        measured["completion_tokens_mean"],
        measured["completion_tokens_min"],
        measured["completion_tokens_max"],
    ) == (3.5, 2, 5)
    assert (measured["turn_tokens_mean"], measured["turn_tokens_max"]) == (2.0, 2)
    assert (measured["sequence_tokens_mean"], measured["sequence_tokens_max"]) == (17 / 3, 8)
    assert (measured["prompt_tokens_mean"], measured["environment_tokens_mean"], measured["trained_tokens_mean"]) == (
        3.0,
        1.0,
        2.0,
    )


def test_a_step_says_what_it_held_and_fillers_count_only_as_load() -> None:
    places = [Place("p", 0), Place("p", 1), Place("p", 2), FILLER]
    plan = StepPlan(1, places, [1.0, -2.0, 5.0, 0.0], [[[0], [1]], [[2], [3]]], 0, Denominators(6.0, 2.0), 0.5,
                    updates=(1, 1), trained=[True, True, False, False])  # fmt: skip
    rows = [row("..xx.x"), row(".x"), row("....xx.xxx.xxxx"), row(".")]
    groups = [group(1, (3, 1)), group(2, (9,))]
    measured = reported(composition_measures(plan, groups, rows, RESULT, trained=4, token_budget=16))
    assert (measured["groups"], measured["rollouts"], measured["sequences"], measured["trained_sequences"]) == (
        2,
        3,
        3,
        2,
    )
    assert (measured["ranks"], measured["epoch"]) == (2, 0)
    assert (measured["forwarded_tokens"], measured["trained_tokens"], measured["untrained_token_share"]) == (
        23,
        4,
        19 / 23,
    )
    assert (measured["updates"], measured["micro_batches"], measured["sequences_per_micro_batch"]) == (2, 2, 0.75)
    assert (measured["micro_batch_tokens_mean"], measured["micro_batch_fill"]) == (5.0, 5 / 16)
    assert measured["rank_imbalance"] == (6 / 4 + 15 / 8) / 2
    assert (measured["advantage_min"], measured["advantage_max"], measured["learning_rate"]) == (-2.0, 1.0, 0.5)


def test_effective_sample_size_counts_tokens_of_equal_weight() -> None:
    weights = np.array([1.0, 1.0, 1.0, 0.0])
    pairs = {"importance_weight": (weights.sum(), 4.0), "importance_weight_squared": (np.square(weights).sum(), 4.0)}
    assert weight_measures(pairs) == {"effective_sample_size": 3.0}
    assert weight_measures({}) == {}


def test_lags_have_a_histogram() -> None:
    assert reported(lag_measures(np.array([0, 2, 2, 1]))) == {
        "lag_mean": 1.25, "lag_max": 2, "lag_tokens/0": 1, "lag_tokens/1": 1, "lag_tokens/2": 2,
    }  # fmt: skip
    assert reported(lag_measures(np.zeros(0, np.int64))) == {"lag_max": 0.0}


def test_waste_has_a_cause_and_short_answers_show_in_the_length_ratio() -> None:
    trained = group(1, (10, 20), facts(discarded_tokens=4), facts(discarded_tokens=4))
    stale, failed = group(2, (60, 90)), group(3, (0, 0), facts(discarded_tokens=7))
    measured = reported(
        waste_measures(
            [trained], [(failed, "generation_failed")], [(stale, "stale")], generated_tokens=30, trained_tokens=25
        )
    )
    assert measured["dropped_groups/generation_failed"] == 1 and measured["returned_groups/stale"] == 1
    assert (measured["wasted_tokens/stale"], measured["wasted_tokens/masked"]) == (150, 5)
    assert (measured["wasted_tokens/generation_failed"], measured["wasted_tokens/discarded"]) == (7, 4)
    assert measured["wasted_token_share"] == 166 / 191
    assert measured["length_ratio"] == 15.0 / 45.0
    assert reported(waste_measures([trained], [], [], generated_tokens=30, trained_tokens=30))["length_ratio"] == 1.0


def test_a_first_step_has_no_rate_over_wall_time() -> None:
    counts = {"trained_tokens": 100.0, "forwarded_tokens": 400.0, "rollouts": 8.0}
    first = reported(clock_measures(Clock(1.0, 0.25, 2.0, None), RESULT, counts))
    assert first["forwarded_tokens_per_busy_second"] == 200 and "iteration_seconds" not in first
    later = reported(clock_measures(Clock(1.0, 0.25, 2.0, 4.0), RESULT, counts))
    assert (later["trainer_utilisation"], later["wait_share"]) == (0.5, 0.25)
    assert (later["trained_tokens_per_second"], later["forwarded_tokens_per_second"], later["rollouts_per_second"]) == (
        25,
        100,
        2,
    )
    assert (later["wait_seconds"], later["plan_seconds"], later["step_seconds"], later["forward_seconds"]) == (
        1.0,
        0.25,
        2.0,
        0.5,
    )


def test_refits_between_two_steps_add_up() -> None:
    refit = RefitResult(Stamp(1, 1), ("a",), (), {"transfer": 0.5, "pause": 0.25}, {"a": 1e-6}, bytes=100)
    late = RefitResult(Stamp(1, 1), ("b",), (), {"transfer": 1.0}, {"b": 1e-5}, bytes=100)
    assert reported(refit_measures([(refit, 1.0), (late, 2.0)])) == {
        "refit_seconds": 3.0, "refit_bytes": 200, "refit_canary": 1e-5,
        "refit_phase_seconds/transfer": 1.5, "refit_phase_seconds/pause": 0.25,
    }  # fmt: skip
    assert refit_measures([]) == {}


@pytest.mark.parametrize(
    ("objective", "scored"),
    [({}, 0.5), ({"beta": 0.1}, 1.5), ({"proximal_policy": "behaviour", "importance_correction": "none"}, 0.0)],
)
def test_utilisation_has_both_denominators_where_the_peak_is_known(objective: dict[str, Any], scored: float) -> None:
    shape = ModelShape(2, 8, 2, 1, 4, 16, 32)
    plan = StepPlan(1, [Place("p", 0)], [1.0], [[[0]], [[0]]], 0, Denominators(1.0, 1.0), 0.1, updates=(1, 1))
    rows, clock = [row("..xx")], Clock(1.0, 0.0, 2.0, 8.0)
    flops = step_flops(shape, [4], 2, scored=scored)
    measured = reported(arithmetic_measures(Machine(shape, 2, flops), plan, rows, ObjectiveConfig(**objective), clock))
    assert measured == {"flops_per_second": flops / 4, "mfu_of_busy": 1 / 4, "mfu_of_wall": 1 / 16}
    unknown = arithmetic_measures(Machine(shape, 2, None), plan, rows, ObjectiveConfig(**objective), clock)
    assert reported(unknown) == {"flops_per_second": flops / 4}


def test_percentiles_are_values_of_the_step() -> None:
    assert percentile(list(range(1, 101)), 0.95) == 95 and percentile([7], 0.95) == 7
