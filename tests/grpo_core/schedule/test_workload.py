"""What is generated depends on the seed, the ordinal and the attempt, and follows its law."""

from __future__ import annotations

import math

import numpy as np
import pytest

from grpo_core.schedule.workload import BLOCK, Draws, LogNormal, Observed, Workload


@pytest.mark.parametrize(
    "law",
    [
        LogNormal(300, 0),
        LogNormal(300, 1.0),
        LogNormal(300, 1.5),
        LogNormal(300, 1.0, 512),
        LogNormal(900, 0.7, 512),
        LogNormal(2.4, 1.0, 6),
        LogNormal(0.5, 0),
        LogNormal(900, 0, 512),
        Observed((3.0, 5.0, 700.0)),
    ],
)
def test_the_mean_is_that_of_what_is_drawn(law: LogNormal | Observed) -> None:
    drawn = law.draw(np.random.default_rng(0), (400_000,))
    assert drawn.mean() == pytest.approx(law.mean, rel=0.02)
    assert drawn.min() >= 1
    if isinstance(law, LogNormal):
        assert drawn.max() <= law.limit


def test_sigma_is_the_spread_of_the_logarithm() -> None:
    drawn = np.log(LogNormal(1e6, 1.5).draw(np.random.default_rng(0), (100_000,)))
    assert drawn.std() == pytest.approx(1.5, rel=0.02)


def test_a_draw_depends_on_nothing_but_seed_ordinal_and_attempt() -> None:
    workload = Workload(LogNormal(100, 1.0), group_size=4, failure_rate=0.5, zero_variance_rate=0.5, seed=3)
    places = [(0, 0), (1, 0), (0, 1), (BLOCK, 0), (5 * BLOCK + 7, 2)]
    forwards, backwards = Draws(workload), Draws(workload)
    first = {place: forwards.draw(*place) for place in places}
    assert first == {place: backwards.draw(*place) for place in reversed(places)}
    assert len({drawn.tokens for drawn in first.values()}) == len(places)
    assert all(len(drawn.tokens) == 4 for drawn in first.values())
    other = Draws(Workload(LogNormal(100, 1.0), group_size=4, seed=4))
    assert other.draw(0, 0).tokens != first[0, 0].tokens


def test_failures_and_equal_rewards_come_at_their_rates() -> None:
    draws = Draws(Workload(LogNormal(100, 0), failure_rate=0.2, zero_variance_rate=0.6))
    drawn = [draws.draw(ordinal, 0) for ordinal in range(10_000)]
    assert math.fsum(each.fails for each in drawn) / 10_000 == pytest.approx(0.2, abs=0.02)
    assert math.fsum(each.zero_variance for each in drawn) / 10_000 == pytest.approx(0.6, abs=0.02)
