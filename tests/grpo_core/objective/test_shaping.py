"""Rewards are reshaped as their formulas say, and what has no score gets none."""

from __future__ import annotations

import numpy as np

from grpo_core.objective.shaping import discounted, overlong_penalty, scaled

NAN = float("nan")


def test_rewards_are_clamped_and_mapped() -> None:
    got = scaled([[-1.0, 0.0, 0.25, 1.0, 7.0, NAN]], source=(0, 1), target=(-2, 2))
    np.testing.assert_allclose(got, [[-2, -2, -1, 2, 2, NAN]])


def test_penalty_grows_over_the_buffer_and_no_further() -> None:
    got = overlong_penalty([[10, 80, 90, 100, 400]], longest=100, buffer=20, penalty=0.5)
    np.testing.assert_allclose(got, [[0, 0, -0.25, -0.5, -0.5]])


def test_truncation_costs_a_share_of_what_was_won_and_never_pays() -> None:
    got = discounted([[1.0, 1.0, -1.0, NAN]], [[True, False, True, True]], 0.25)
    np.testing.assert_allclose(got, [[0.25, 1, -1, NAN]])
