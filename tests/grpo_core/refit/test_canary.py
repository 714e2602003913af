"""The canary tells the trainer's weights from any others."""

from __future__ import annotations

import math

import pytest

from grpo_core.refit.canary import CANARY_TOKENS, Canary, CanaryFailed, canary_tokens, check_canary

CANARY = Canary((5, 6, 7), (-1.0, -2.0), tolerance=1e-4)


def test_tokens_are_those_of_the_first_prompts_and_fit_the_context() -> None:
    prompts = [[number] * 10 for number in range(20)]
    tokens = canary_tokens(prompts, context=1024)
    assert tokens[:20] == (0,) * 10 + (1,) * 10
    assert len(tokens) == CANARY_TOKENS
    assert len(canary_tokens(prompts, context=16)) == 15
    assert canary_tokens([[7, 8]], context=1024) == (7, 8)
    with pytest.raises(ValueError, match="two tokens"):
        canary_tokens([[7]], context=1024)


def test_an_unlikely_token_may_differ_in_proportion() -> None:
    unlikely = Canary((5, 6), (-30.0,), tolerance=1e-4)
    assert check_canary("e0", unlikely, [-30.002]) == pytest.approx(2e-3)
    with pytest.raises(CanaryFailed):
        check_canary("e0", unlikely, [-30.004])


def test_difference_within_the_tolerance_is_returned() -> None:
    assert check_canary("e0", CANARY, [-1.00005, -2.0]) == pytest.approx(5e-5)


@pytest.mark.parametrize(("tokens", "most", "places"), [(3, 8, [0, 1]), (65, 4, [15, 31, 47, 63]), (11, 3, [2, 5, 9])])
def test_some_places_stand_for_all_and_the_last_is_among_them(tokens: int, most: int, places: list[int]) -> None:
    assert Canary(tuple(range(tokens)), (-1.0,) * (tokens - 1), tolerance=1e-4).thinned(most) == places


def test_scores_of_some_places_are_held_against_those_places() -> None:
    assert check_canary("e0", CANARY, [-2.00005], [1]) == pytest.approx(5e-5)
    with pytest.raises(CanaryFailed, match="scored 1 of 2"):
        check_canary("e0", CANARY, [-2.0], [0, 1])
    with pytest.raises(CanaryFailed, match="differs"):
        check_canary("e0", CANARY, [-1.0], [1])


@pytest.mark.parametrize("scores", [[-1.0, -2.0003], [-1.0, math.nan], [math.nan, -2.0], [-1.0], [-1.0, -2.0, -3.0]])
def test_other_weights_damaged_weights_and_missing_scores_fail(scores: list[float]) -> None:
    with pytest.raises(CanaryFailed, match="e0"):
        check_canary("e0", CANARY, scores)


def test_canary_needs_one_logprob_per_token_after_the_first() -> None:
    with pytest.raises(ValueError, match="needs 2 log-probs"):
        Canary((1, 2, 3), (-1.0,), tolerance=1e-4)
