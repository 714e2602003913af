"""Rates and utilisation come from events and the clock that is handed in."""

import io

import pytest
from rich.console import Console

from flows.live import clock, render, spark
from flows.progress import HORIZON_SECONDS, Meter, Progress
from grpo_core.evaluation import Evaluation, Score
from storage.layout import LedgerName
from storage.ledger import LedgerFooter, Totals


def footer(step: int, seconds: float) -> LedgerFooter:
    return LedgerFooter(LedgerName(1, step), "", Totals(), {"step_seconds": seconds})


def test_rates_are_those_of_the_time_since_the_first_sample_up_to_a_minute() -> None:
    meter = Meter()
    meter.sample(100.0, busy=False)
    meter.tokens(500, 105.0)
    assert meter.tokens_per_second(110.0) == pytest.approx(50.0)
    assert meter.tokens_per_second(105.0 + HORIZON_SECONDS + 1) == 0.0


def test_engine_utilisation_counts_the_time_between_busy_samples() -> None:
    meter = Meter()
    for moment, busy in ((0.0, False), (1.0, True), (2.0, True), (3.0, False), (4.0, False)):
        meter.sample(moment, busy=busy)
    assert meter.engine_utilisation(4.0) == pytest.approx(0.5)


def test_idle_time_is_the_windows_doing_only_while_it_is_full() -> None:
    meter = Meter()
    samples = ((0.0, False, False), (1.0, True, True), (2.0, False, True), (3.0, False, False), (4.0, False, True))
    for moment, busy, full in samples:
        meter.sample(moment, busy=busy, window_full=full)
    assert meter.metrics(4.0) == {"pool/utilisation": 0.25, "pool/held_back": 0.5, "pool/tokens_per_second": 0.0}


def test_silence_is_the_time_since_the_last_group() -> None:
    meter = Meter()
    assert "pool/silent_seconds" not in meter.metrics(1.0)
    meter.tokens(10, 2.0)
    meter.tokens(0, 3.0)
    assert meter.metrics(7.5)["pool/silent_seconds"] == 4.5


def test_trainer_utilisation_and_pace_come_from_the_ledger() -> None:
    meter = Meter()
    meter.sample(0.0, busy=False)
    for step in (1, 2, 3):
        meter.step(footer(step, 1.5), 2.0 * step)
    assert meter.trainer_utilisation(6.0) == pytest.approx(0.75)
    assert meter.seconds_per_step(6.0) == pytest.approx(2.0)
    assert Meter().seconds_per_step(6.0) is None


def test_times_and_curves_are_readable() -> None:
    assert [clock(value) for value in (None, 59.6, 3661)] == ["–", "1:00", "1:01:01"]
    assert spark([0.0, 0.5, 1.0]) == "▁▄█" and spark([2.0, 2.0]) == "▁▁" and spark([]) == ""


def test_the_newest_evaluation_is_in_the_live_view() -> None:
    evaluation = Evaluation(1, 4, 8, {"sampled": Score(0.5, 0.0, 8)}, 0.75)
    progress = Progress(
        run_id="r", phase="training", attempt=1, step=9, steps=20, version=4, reward=0.1, lag_mean=0.0, lag_max=0,
        tokens_per_second=1.0, trainer_utilisation=0.5, engine_utilisation=0.5, in_flight=1, buffered=1,
        eta_seconds=None, elapsed_seconds=1.0, evaluation=evaluation,
    )  # fmt: skip
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(render(progress))
    assert evaluation.line() in console.export_text()
