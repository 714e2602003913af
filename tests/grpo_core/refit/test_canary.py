"""The canary tells the trainer's weights from any others."""

from __future__ import annotations

import math

import pytest

from grpo_core.refit.canary import CANARY_TOKENS, Canary, CanaryFailed, canary_tokens, check_canary

CANARY = Canary((5, 6, 7), (-1.0, -2.0), tolerance=1e-4)


def test_tokens_are_fixed_by_the_seed_and_fit_vocabulary_and_context() -> None:
    tokens = canary_tokens(100, seed=1, context=1024)
    assert tokens == canary_tokens(100, seed=1, context=1024) != canary_tokens(100, seed=2, context=1024)
    assert len(tokens) == CANARY_TOKENS
    assert all(0 <= token < 100 for token in tokens)
    assert len(canary_tokens(100, seed=1, context=16)) == 15


def test_difference_within_the_tolerance_is_returned() -> None:
    assert check_canary("e0", CANARY, [-1.00005, -2.0]) == pytest.approx(5e-5)


@pytest.mark.parametrize("scores", [[-1.0, -2.0002], [-1.0, math.nan], [math.nan, -2.0], [-1.0], [-1.0, -2.0, -3.0]])
def test_other_weights_damaged_weights_and_missing_scores_fail(scores: list[float]) -> None:
    with pytest.raises(CanaryFailed, match="e0"):
        check_canary("e0", CANARY, scores)


def test_canary_needs_one_logprob_per_token_after_the_first() -> None:
    with pytest.raises(ValueError, match="needs 2 log-probs"):
        Canary((1, 2, 3), (-1.0,), tolerance=1e-4)
