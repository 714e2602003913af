"""Whoever kills the flow every time is found without giving up anybody else."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from grpo_core.schedule.suspects import Suspects, judge


def test_one_death_raises_no_suspicion() -> None:
    verdict = judge([frozenset({1, 2, 3})], lives=3)
    assert not verdict.suspects.ordinals and not verdict.culprits


def test_what_was_in_flight_at_both_of_the_last_deaths_is_suspected() -> None:
    verdict = judge([frozenset({1, 2, 3}), frozenset({2, 3, 4}), frozenset({3})], lives=3)
    assert verdict.suspects.ordinals == {2, 3} and not verdict.culprits


def test_suspects_are_tried_a_few_at_a_time_with_nothing_beside_them() -> None:
    suspects = Suspects(frozenset(range(8)))
    returned = frozenset(range(20))
    assert suspects.next(returned=returned, in_flight=frozenset(), count=5) == (0, 1)
    assert suspects.next(returned=returned - {0, 1}, in_flight=frozenset({0, 1}), count=5) == ()
    assert suspects.next(returned=returned - {0, 1}, in_flight=frozenset(), count=5) == (2, 3)
    assert suspects.next(returned=returned, in_flight=frozenset(), count=1) == (0,)


def test_with_the_last_suspect_cleared_everything_is_leased_again() -> None:
    suspects = Suspects(frozenset({4}))
    assert suspects.next(returned=frozenset({5}), in_flight=frozenset({4}), count=5) == ()
    assert suspects.next(returned=frozenset({5}), in_flight=frozenset(), count=5) is None


def test_a_suspect_that_was_not_alone_is_no_culprit() -> None:
    assert not judge([frozenset({1, 2})] * 5, lives=3).culprits
    assert not judge([frozenset({1})] * 2, lives=3).culprits
    assert judge([frozenset({1}), frozenset({1, 2}), frozenset({1, 2, 3})], lives=3).culprits == {1}


@given(st.integers(1, 100), st.integers(0, 1000), st.integers(2, 5))
def test_the_culprit_is_found_and_nobody_else(count: int, seed: int, lives: int) -> None:
    """A flow that leases as it is told and dies whenever the culprit is in flight."""
    ordinals = frozenset(range(count))
    culprit = random.Random(seed).randrange(count)
    deaths: list[frozenset[int]] = []
    for _ in range(20):
        verdict = judge(deaths[:lives], lives=lives)
        if verdict.culprits:
            break
        waiting, in_flight = set(ordinals), frozenset[int]()
        while culprit not in in_flight:
            chosen = verdict.suspects.next(returned=frozenset(waiting), in_flight=frozenset(), count=count)
            in_flight = frozenset(waiting if chosen is None else chosen)
            waiting -= in_flight
        deaths.insert(0, in_flight)
    assert verdict.culprits == {culprit}
