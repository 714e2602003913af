"""What was given counts more than what was measured, and that more than what is assumed."""

from __future__ import annotations

import pytest

from grpo_core.config import ExternalPool, LocalPool, RunConfig
from grpo_core.schedule.rates import Given, Rates, Served, observed_rates, rates_of
from grpo_core.schedule.workload import LogNormal, Observed

MEASURED = Rates(50.0, 900.0, 7.0, 0.5, Observed((100.0, 200.0)))


def test_what_nobody_knows_is_assumed_and_named() -> None:
    rates = rates_of(RunConfig(), Given())
    assert rates.assumed == ("mean length", "sigma", "tokens per second", "step seconds")
    assert rates.step_seconds > 0 and 0 < rates.lengths.mean < RunConfig().generation.max_completion_length
    assert rates.sequence_tokens_per_second * LocalPool().max_num_seqs > rates.engine_tokens_per_second


def test_what_was_measured_is_taken_as_it_is() -> None:
    assert rates_of(RunConfig(), Given(), MEASURED) == MEASURED


def test_what_is_given_replaces_what_was_measured() -> None:
    rates = rates_of(RunConfig(), Given(tokens_per_second=3200.0, step_seconds=2.0, sigma=0.5), MEASURED)
    assert (rates.engine_tokens_per_second, rates.step_seconds, rates.refit_seconds) == (3200.0, 2.0, 0.5)
    assert rates.lengths == LogNormal(150.0, 0.5, 512.0)
    assert rates.sequence_tokens_per_second == pytest.approx(3 * 3200.0 / 64)
    assert rates.assumed == ()


def test_longer_completions_make_the_assumed_step_longer() -> None:
    short, long = (rates_of(RunConfig(), Given(mean_length=length, sigma=0)) for length in (50, 100))
    assert long.step_seconds == pytest.approx(2 * short.step_seconds)


def test_engines_of_somebody_else_are_taken_for_ours() -> None:
    external = RunConfig(pool=ExternalPool(urls=("http://engine:8000",)))
    assert rates_of(external, Given(tokens_per_second=640.0)).sequence_tokens_per_second == pytest.approx(30.0)


def test_rates_of_a_run_are_those_of_its_busiest_time() -> None:
    """Two engines; each has four requests of 100 and 300 tokens at once for ten seconds, then one alone."""
    served = [Served(name, (100, 300), 10.0, 10.0) for name in ("a", "b") for _ in range(4)]
    served += [Served(name, (400, 400), 10.0, 20.0) for name in ("a", "b")]
    rates = observed_rates(served, step_seconds=[1.0, 9.0, 2.0], refit_seconds=[0.2, 0.4, 0.3])
    assert rates.engine_tokens_per_second == pytest.approx(160.0)
    assert rates.sequence_tokens_per_second == pytest.approx(40.0, rel=0.1)
    assert (rates.step_seconds, rates.refit_seconds) == (2.0, 0.3)
    assert rates.lengths.mean == pytest.approx((8 * 400 + 2 * 800) / 20)


def test_a_run_without_refits_has_none_to_count() -> None:
    assert observed_rates([Served("a", (10,), 1.0, 1.0)], step_seconds=[1.0], refit_seconds=[]).refit_seconds == 0
