"""The credit of a step: advantages, who is trained, who was rewarded, and the figures of both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from grpo_core.config import GRPOConfig
from grpo_core.objective.advantages import AdvantageError, group_advantages
from grpo_core.objective.credit import Credit, step_advantages

NAN = float("nan")
REWARDS = np.array([[1.0, 0.0, 0.5, 0.5], [1.0, 1.0, 1.0, 1.0], [NAN, -1.0, 2.0, 0.0]])
LENGTHS = np.array([[10, 90, 20, 40], [5, 5, 5, 5], [7, 100, 30, 60]])
TRUNCATED = np.array([[0, 1, 0, 0], [0, 0, 0, 0], [0, 1, 0, 1]], dtype=bool)


def credit(settings: dict[str, Any] | None = None, **extra: Any) -> Credit:
    config = GRPOConfig.model_validate(settings or {})
    return step_advantages(REWARDS, config, lengths=LENGTHS, truncated=TRUNCATED, **extra)


def mean(given: Credit, name: str) -> float:
    top, bottom = given.metrics[name]
    return top / bottom


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "none"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_without_options_it_is_the_comparison_within_groups(baseline: Any, scale: Any) -> None:
    ddof = None if scale == "none" else 1
    given = credit({"advantage_baseline": baseline, "advantage_scale": scale, "advantage_ddof": ddof})
    expected = group_advantages(REWARDS, baseline=baseline, scale=scale, ddof=ddof)
    np.testing.assert_array_equal(given.advantages, expected)
    np.testing.assert_array_equal(given.trained, ~np.isnan(REWARDS))
    np.testing.assert_array_equal(given.rewarded, REWARDS > 0)


def test_truncated_rollouts_lose_their_gradient_and_stay_in_the_baseline() -> None:
    given, all_trained = credit({"overlong_filtering": True}), credit()
    np.testing.assert_array_equal(given.trained, ~np.isnan(REWARDS) & ~TRUNCATED)
    np.testing.assert_array_equal(given.advantages, np.where(TRUNCATED, 0.0, all_trained.advantages))
    assert mean(given, "trained_rollouts") == 8 / 12


def test_shaping_comes_before_the_comparison() -> None:
    shaping = {"max_response_length": 100, "overlong_buffer_length": 20, "truncated_coefficient": 0.5}
    given = credit(
        {
            "reward_scaling": {"source_min": 0, "source_max": 2, "target_min": 0, "target_max": 4},
            "reward_shaping": shaping,
            "advantage_scale": "none",
        }
    )
    shaped = [[2, -0.5, 1, 1], [2, 2, 2, 2], [NAN, -1, 4, 0]]
    np.testing.assert_allclose(given.advantages, group_advantages(shaped, scale="none"))
    assert mean(given, "reward_shaped") == pytest.approx(np.nanmean(shaped))
    assert mean(given, "reward_mean") == pytest.approx(np.nanmean(REWARDS))


def test_a_buffer_of_no_tokens_penalises_nothing() -> None:
    discount = {"max_response_length": 1, "truncated_coefficient": 0.5}
    given = credit({"reward_shaping": {**discount, "overlong_buffer_length": 0}})
    expected = credit({"reward_shaping": {**discount, "overlong_buffer_length": 1, "overlong_buffer_penalty": 0}})
    np.testing.assert_array_equal(given.advantages, expected.advantages)


def test_each_source_is_compared_by_itself() -> None:
    components = {"style": [[0.0, 1.0, 0.0, 1.0]] * 3, "truth": [[NAN, 100.0, 0.0, 0.0]] * 3}
    weights = {"style": 1.0, "truth": 0.5}
    given = credit({"advantage_per_source": True}, components=components, weights=weights)
    expected = [group_advantages(components["style"])[0] + 0.5 * group_advantages(components["truth"])[0]] * 3
    np.testing.assert_allclose(given.advantages, np.where(np.isnan(REWARDS), 0.0, expected))
    assert given.metrics["reward/truth"] == (300.0, 9.0)


def test_with_each_source_by_itself_the_penalty_is_one_more() -> None:
    shaping = {"max_response_length": 100, "overlong_buffer_length": 20}
    given = credit(
        {"advantage_per_source": True, "reward_shaping": shaping},
        components={"only": REWARDS},
        weights={"only": 1.0},
    )
    penalty = [[0, -0.5, 0, 0], [0] * 4, [NAN, -1, 0, 0]]
    np.testing.assert_allclose(given.advantages, group_advantages(REWARDS) + group_advantages(penalty))


def test_whitening_counts_rollouts_or_their_tokens() -> None:
    for kind, times in (("rollouts", np.ones_like(LENGTHS)), ("tokens", LENGTHS)):
        given = credit({"advantage_whitening": kind, "advantage_scale": "none"})
        times = times * given.trained
        assert np.average(given.advantages, weights=times) == pytest.approx(0, abs=1e-12)
        assert np.average(given.advantages**2, weights=times) == pytest.approx(1)


def test_whitening_is_over_the_tokens_that_are_trained() -> None:
    """By hand: advantages ±1 of 3 and 1 fresh tokens have the mean ½ and the spread √¾;
    the stale tokens say nothing."""
    config = GRPOConfig(advantage_whitening="tokens", advantage_scale="none")
    rewards, lengths, cut = [[2.0, 0.0, 1.0]], [[3, 9, 9]], [[0, 0, 0]]
    given = step_advantages(rewards, config, lengths=lengths, truncated=cut, trainable=[[3, 1, 0]])
    np.testing.assert_allclose(given.advantages, [[0.5 / 0.75**0.5, -1.5 / 0.75**0.5, 0.0]])
    np.testing.assert_array_equal(given.trained, [[True, True, False]])
    assert given.metrics["trained_rollouts"] == (2.0, 3.0)


def test_tokens_beyond_the_window_still_count_as_length() -> None:
    shaping = {"max_response_length": 100, "overlong_buffer_length": 20}
    stale = credit({"reward_shaping": shaping}, trainable=np.minimum(LENGTHS, 6))
    np.testing.assert_array_equal(stale.advantages, credit({"reward_shaping": shaping}).advantages)


def test_members_that_failed_count_nowhere() -> None:
    rewards, lengths, cut = [[1.0, NAN, NAN, 0.0]], [[5, 0, 7, 9]], [[0, 0, 0, 1]]
    given = step_advantages(rewards, GRPOConfig(), lengths=lengths, truncated=cut)
    assert given.metrics["unscorable_rollouts"] == (1.0, 3.0)
    assert given.metrics["truncated_rollouts"] == (1.0, 3.0)
    assert given.metrics["trained_rollouts"] == (2.0, 3.0)


def test_advantages_are_clipped_last() -> None:
    given = credit({"advantage_clip_low": -0.5, "advantage_clip_high": 1.0, "advantage_whitening": "rollouts"})
    assert given.advantages.min() == -0.5 and given.advantages.max() == 1.0
    assert 0 < mean(given, "advantage_clipped") < 1


def test_figures_of_a_step() -> None:
    given = credit()
    assert mean(given, "zero_variance_share") == pytest.approx(1 / 3)
    assert mean(given, "unscorable_rollouts") == 1 / 12
    assert mean(given, "truncated_rollouts") == 3 / 12
    assert mean(given, "reward_std") == pytest.approx((REWARDS[0].std() + np.nanstd(REWARDS[2])) / 3)
    assert mean(given, "advantage_magnitude") > abs(mean(given, "advantage"))


def test_a_step_without_any_score_is_zero_and_trains_nothing() -> None:
    nothing = np.full((2, 3), NAN)
    config = GRPOConfig(advantage_whitening="tokens", overlong_filtering=True)
    given = step_advantages(nothing, config, lengths=np.ones((2, 3)), truncated=np.zeros((2, 3)))
    assert not given.advantages.any() and not given.trained.any()


@pytest.mark.parametrize(
    ("settings", "extra", "named"),
    [
        ({"advantage_per_source": True}, {}, "pass components and weights"),
        ({"advantage_per_source": True}, {"components": {"a": REWARDS}, "weights": {"b": 1.0}}, "'a'"),
    ],
)
def test_sources_without_weights_are_refused(settings: dict[str, Any], extra: dict[str, Any], named: str) -> None:
    with pytest.raises(AdvantageError, match=named):
        credit(settings, **extra)


def test_lengths_of_another_shape_are_refused() -> None:
    with pytest.raises(AdvantageError, match=r"lengths has the shape \(1, 4\)"):
        step_advantages(REWARDS, GRPOConfig(), lengths=LENGTHS[:1], truncated=TRUNCATED)
