"""Failures in a row are borne up to a limit, and the first of them is the one that is told."""

import pytest

from grpo_core.schedule.tolerance import Tolerance, TooManyFailures


def test_without_tolerance_the_first_failure_is_fatal() -> None:
    with pytest.raises(TooManyFailures, match="1 groups failed in a row.*max_generation_failures=0.*no engine"):
        Tolerance(0).failed("no engine")


def test_the_first_cause_is_shown_and_not_the_last() -> None:
    tolerance = Tolerance(2)
    tolerance.failed("the reward function raised")
    tolerance.failed("timeout")
    with pytest.raises(TooManyFailures, match="3 groups .* the first cause was: the reward function raised"):
        tolerance.failed("timeout")


def test_a_good_group_forgives_what_was_before_it() -> None:
    tolerance = Tolerance(1)
    for _ in range(5):
        tolerance.failed("timeout")
        tolerance.succeeded()
    tolerance.failed("another")
    with pytest.raises(TooManyFailures, match="first cause was: another"):
        tolerance.failed("third")


def test_what_was_fatal_stays_fatal() -> None:
    tolerance = Tolerance(0)
    for call in (lambda: tolerance.failed("gone"), tolerance.succeeded, tolerance.succeeded):
        with pytest.raises(TooManyFailures, match="gone"):
            call()


def test_groups_that_fail_together_count_each() -> None:
    with pytest.raises(TooManyFailures, match="4 groups"):
        Tolerance(3).failed("lease expired", 4)
