"""A run that is asked to end, ends soon, leaves nothing, and can be continued; a run has one owner."""

import signal

import pytest

from tests.scenarios.run_driver import RunDriver, assert_one_sentence, steps_done
from tests.scenarios.soundness import assert_sound, attempts

STOP_SECONDS = 15.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_signal_ends_the_run_soon_and_it_can_be_continued(driver: RunDriver, number: signal.Signals) -> None:
    process = driver.start()
    driver.wait_for(steps_done(3))
    process.send_signal(number)
    assert driver.finish(STOP_SECONDS) == 128 + number
    assert driver.orphans(0.0) == []
    assert "the same command continues the run" in driver.errors
    assert "Traceback" not in driver.errors
    if number == signal.SIGTERM:
        assert driver.run() == 0, driver.errors
        assert attempts(driver.store) == 2
        assert_sound(driver)


def test_signal_while_the_engines_are_starting_ends_the_command(driver: RunDriver) -> None:
    process = driver.start()
    driver.wait_for(lambda store: bool(driver.find("engine")))
    process.send_signal(signal.SIGTERM)
    assert driver.finish(STOP_SECONDS) == 128 + signal.SIGTERM
    assert driver.orphans(0.0) == []


def test_second_flow_is_refused_and_take_over_fences_the_first(driver: RunDriver) -> None:
    first = driver.start()
    driver.wait_for(steps_done(1))
    first.send_signal(signal.SIGSTOP)
    try:
        assert driver.run() == 1
        assert str(first.pid) in driver.errors and "--take-over" in driver.errors
        assert_one_sentence(driver.errors)
        driver.start("--take-over")
        driver.wait_for(lambda store: attempts(store) == 2)
    finally:
        first.send_signal(signal.SIGCONT)
    assert driver.finish() == 0, driver.errors
    assert first.wait(STOP_SECONDS) == 1
    assert attempts(driver.store) == 2, "a fenced flow started another trainer"
    assert_sound(driver)
    assert driver.orphans() == []
