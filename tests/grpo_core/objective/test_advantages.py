"""Advantages compare a rollout with its siblings, exactly where exactness matters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_core.objective.advantages import AdvantageError, group_advantages, source_advantages, whitened

CASES = json.loads((Path(__file__).parents[2] / "cases" / "losses.json").read_text())["advantages"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_documented_case(case: dict[str, Any]) -> None:
    options = {key: case[key] for key in ("baseline", "ddof") if key in case}
    (advantages,) = group_advantages([case["rewards"]], **options)
    np.testing.assert_allclose(advantages[:1], case.get("expect", [case.get("expect_first")])[:1], atol=1e-5)
    if "expect" in case:
        np.testing.assert_allclose(advantages, case["expect"], atol=1e-5)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0.5, 0.25, 0], [3, 0.1601, -0.5, -1.5275]),
        ([1, 1, 0, 0], [1.1547, 1.1547, -1.1547, -1.1547]),
        ([1, 0], [1, -1]),
    ],
)
def test_leave_one_out_compares_with_the_others(rewards: list[float], expected: list[float]) -> None:
    np.testing.assert_allclose(group_advantages([rewards], baseline="leave_one_out")[0], expected, atol=1e-4)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("value", [0.1, 0.95, 1e8])
def test_equal_rewards_give_exactly_zero(baseline: Any, value: float) -> None:
    assert not group_advantages([[value] * 7], baseline=baseline).any()


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "none"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_unscorable_member_gets_zero_and_leaves_the_others_alone(baseline: Any, scale: Any) -> None:
    whole = group_advantages([[1.0, 0.0, 0.5]], baseline=baseline, scale=scale)
    holed = group_advantages([[1.0, float("nan"), 0.0, 0.5]], baseline=baseline, scale=scale)
    masked = group_advantages([[1.0, 9.0, 0.0, 0.5]], baseline=baseline, scale=scale, mask=[[1, 0, 1, 1]])
    np.testing.assert_array_equal(np.delete(holed, 1, axis=1), whole)
    np.testing.assert_array_equal(masked, holed)
    assert holed[0, 1] == 0.0


def test_group_without_scorable_members_is_zero() -> None:
    advantages = group_advantages([[float("nan")] * 2, [1.0, 3.0]], scale="batch")
    np.testing.assert_allclose(advantages, [[0, 0], [-1, 1]], atol=1e-5)


def test_single_scorable_member_has_no_advantage_over_itself() -> None:
    for baseline in ("mean", "leave_one_out"):
        assert not group_advantages([[2.0, float("nan")]], baseline=baseline).any()


def test_batch_scale_divides_by_the_spread_of_all_rewards() -> None:
    rewards = np.array([[0.0, 1.0], [0.0, 4.0]])
    expected = (rewards - rewards.mean(axis=1, keepdims=True)) / (rewards.std() + 1e-6)
    np.testing.assert_allclose(group_advantages(rewards, scale="batch"), expected)


def test_no_scale_and_no_baseline_return_what_was_asked() -> None:
    rewards = [[1.0, 3.0]]
    assert group_advantages(rewards, scale="none").tolist() == [[-1, 1]]
    assert group_advantages(rewards, baseline="none", scale="none").tolist() == rewards


def test_torch_rewards_are_taken_and_left_alone() -> None:
    rewards = torch.tensor([[1.0, float("nan"), 3.0]])
    kept = rewards.clone()
    np.testing.assert_allclose(group_advantages(rewards), [[-1, 0, 1]], atol=1e-5)
    torch.testing.assert_close(rewards, kept, equal_nan=True)


@pytest.mark.parametrize(
    ("rewards", "options", "named"),
    [
        ([1.0, 2.0], {}, r"shape \(2,\)"),
        ([[1.0, float("inf")]], {}, "member 1 of group 0 has the reward inf"),
        ([[1.0, 2.0]], {"mask": [[1]]}, r"mask has the shape \(1, 1\)"),
        ([[1.0, 2.0]], {"baseline": "median"}, "'median'"),
    ],
)
def test_unusable_rewards_are_refused(rewards: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(AdvantageError, match=named):
        group_advantages(rewards, **options)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8), st.randoms(use_true_random=False))
def test_order_of_members_does_not_matter(rewards: list[float], random: Any) -> None:
    order = list(range(len(rewards)))
    random.shuffle(order)
    for baseline in ("mean", "leave_one_out"):
        straight = group_advantages([rewards], baseline=baseline)[0]
        shuffled = group_advantages([[rewards[place] for place in order]], baseline=baseline)[0]
        np.testing.assert_allclose(shuffled, straight[order], rtol=1e-6, atol=1e-9)


def test_a_source_of_small_spread_counts_as_much_as_one_of_large() -> None:
    components = {"large": [[100.0, 0.0]], "small": [[0.0, 0.01]]}
    advantages = source_advantages(components, {"large": 1.0, "small": 1.0})
    np.testing.assert_allclose(advantages, [[0, 0]], atol=1e-3)


def test_no_sources_are_refused() -> None:
    with pytest.raises(AdvantageError, match="do not match"):
        source_advantages({}, {})


def test_a_rounding_residue_is_not_whitened_into_an_advantage() -> None:
    white = whitened(np.array([[1e-17, -1e-17, 0.0, 0.0]]), np.ones((1, 4)))
    assert np.abs(white).max() < 1e-9


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 5)), min_size=1, max_size=8))
def test_whitening_by_counts_is_whitening_of_repeated_values(entries: list[tuple[float, int]]) -> None:
    values, counts = np.array([[value for value, _ in entries]]), np.array([[count for _, count in entries]])
    white = whitened(values, counts)
    repeated = np.repeat(values[0], counts[0])
    if repeated.size == 0 or repeated.min() == repeated.max():
        assert not white.any()
    else:
        expected = (repeated - repeated.mean()) / max(repeated.std(), 1e-6)
        np.testing.assert_allclose(np.repeat(white[0], counts[0]), expected, rtol=1e-6, atol=1e-6)
        assert not white[counts == 0].any()
