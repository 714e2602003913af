"""A plan holds every sequence once, wastes little space, and gives the ranks even work."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_core.training.packing import PackingError, Plan, pack


def rows_of(plan: Plan) -> list[list[int]]:
    return [row for micro_batch in plan.micro_batches for row in micro_batch]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 120), max_size=60), st.integers(1, 5), st.integers(20, 110))
def test_every_sequence_is_placed_once_in_a_full_enough_row(lengths: list[int], rows: int, budget: int) -> None:
    oversize = [index for index, length in enumerate(lengths) if length > budget]
    try:
        plan = pack(lengths, rows=rows, token_budget=budget)
    except PackingError as error:
        assert error.missing > 0
        plan = pack(lengths + [1] * error.missing, rows=rows, token_budget=budget)
        lengths = lengths + [1] * error.missing
    assert plan.oversize == oversize
    assert sorted(index for row in rows_of(plan) for index in row) == sorted(set(range(len(lengths))) - set(oversize))
    assert all(len(micro_batch) == rows for micro_batch in plan.micro_batches)
    assert all(0 < sum(lengths[index] for index in row) <= budget for row in rows_of(plan))
    assert plan == pack(lengths, rows=rows, token_budget=budget)


def test_fewer_sequences_than_rows_are_refused_with_the_number_missing() -> None:
    with pytest.raises(PackingError, match=r"3 sequences cannot fill 4 rows .*\(1 more exceed") as caught:
        pack([5, 5, 99, 5], rows=4, token_budget=10)
    assert caught.value.missing == 1


def test_last_micro_batch_that_cannot_be_filled_is_refused() -> None:
    with pytest.raises(PackingError) as caught:
        pack([10] * 9, rows=8, token_budget=10)
    assert caught.value.missing == 7


def test_only_oversize_sequences_give_an_empty_plan() -> None:
    assert pack([11, 12], rows=2, token_budget=10) == Plan([], [0, 1])
    assert pack([], rows=2, token_budget=10) == Plan([], [])


@pytest.mark.parametrize("arguments", [([1, 0], 1, 10), ([1], 0, 10), ([1], 1, 0)])
def test_impossible_arguments_are_refused(arguments: tuple[list[int], int, int]) -> None:
    lengths, rows, budget = arguments
    with pytest.raises(PackingError, match="at least 1"):
        pack(lengths, rows=rows, token_budget=budget)


@pytest.mark.parametrize("seed", range(3))
def test_large_step_fills_its_rows_and_balances_its_ranks(seed: int) -> None:
    lengths = np.clip(np.random.default_rng(seed).lognormal(7, 1, 8192), 16, 32768).astype(int)
    plan = pack(lengths.tolist(), rows=8, token_budget=32768)
    assert lengths.sum() / (len(rows_of(plan)) * 32768) >= 0.98
    work = np.array([[np.square(lengths[row]).sum() for row in micro_batch] for micro_batch in plan.micro_batches])
    assert work.max(axis=1).sum() / work.mean(axis=1).sum() < 1.1


def test_single_micro_batch_balances_squares_rather_than_tokens() -> None:
    plan = pack([8, 4, 4, 4, 4], rows=2, token_budget=20)
    assert sorted(map(sorted, plan.micro_batches[0])) == [[0], [1, 2, 3, 4]]


def test_best_fit_serves_where_spreading_fails() -> None:
    plan = pack([3, 3, 2, 2, 2], rows=2, token_budget=6)
    assert [sorted(row) for row in plan.micro_batches[0]] == [[0, 1], [2, 3, 4]]


def test_row_that_best_fit_leaves_empty_receives_a_sequence() -> None:
    plan = pack([3, 3, 2, 2, 2, 2], rows=3, token_budget=5)
    assert all(row for row in rows_of(plan))
