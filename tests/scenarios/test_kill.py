"""Kill −9 of any process at any moment, then the same command: nothing lost, nothing twice, nothing stale."""

import json

import pytest

from tests.scenarios.run_driver import Part, RunDriver, checkpoint_committed, steps_done
from tests.scenarios.soundness import assert_sound, attempts


def start_and_stall_in_the_refit_of(driver: RunDriver, step: int) -> None:
    """Return when this step is in the ledger, its weights are half-way to the engine, and it has no checkpoint yet."""
    # The cold refit is the first weight update of an engine.
    driver.faults.write_text(json.dumps({"stall_in_update": step + 1}))
    driver.start()
    driver.wait_for_stall()
    assert steps_done(step)(driver.store) and not checkpoint_committed(step)(driver.store)


def test_flow_killed_before_its_first_checkpoint_and_again_after_it(driver: RunDriver) -> None:
    start_and_stall_in_the_refit_of(driver, 1)
    driver.kill("flow")
    assert driver.orphans() == []
    driver.start()
    driver.wait_for(lambda store: attempts(store) == 2 and steps_done(3)(store))
    driver.kill("flow")
    assert driver.orphans() == []
    assert driver.run() == 0, driver.errors
    assert attempts(driver.store) == 3
    assert_sound(driver)
    assert driver.orphans() == []


def test_flow_killed_in_a_refit_after_the_ledger_and_before_the_checkpoint(driver: RunDriver) -> None:
    start_and_stall_in_the_refit_of(driver, 4)
    driver.kill("flow")
    assert driver.orphans() == []
    assert driver.run() == 0, driver.errors
    assert_sound(driver)


def test_flow_killed_while_its_trainer_is_still_starting_leaves_nothing(driver: RunDriver) -> None:
    driver.start()
    driver.wait_for(lambda store: bool(driver.find("trainer rank")))
    driver.kill("flow")
    assert driver.orphans() == []


@pytest.mark.parametrize("part", ["trainer rank", "torchrun"])
def test_trainer_killed_in_a_refit_after_the_ledger_and_before_the_checkpoint(driver: RunDriver, part: Part) -> None:
    start_and_stall_in_the_refit_of(driver, 4)
    driver.kill(part)
    assert driver.finish() == 0, driver.errors
    assert attempts(driver.store) == 2
    assert_sound(driver)
    assert driver.orphans() == []


def test_torchrun_killed_while_its_rank_is_still_starting(driver: RunDriver) -> None:
    driver.start()
    driver.wait_for(lambda store: bool(driver.find("trainer rank")))
    first = {process.pid for process in driver.find("trainer rank")}
    driver.kill("torchrun")
    assert driver.finish() == 0, driver.errors
    assert not first & {process.pid for process in driver.processes()}
    assert_sound(driver)
    assert driver.orphans() == []


@pytest.mark.parametrize("fault", [{"die_at_request": 10}, {"die_in_update": 3}], ids=["generating", "refitted"])
def test_engine_that_dies_is_replaced(driver: RunDriver, fault: dict[str, int]) -> None:
    driver.faults.write_text(json.dumps(fault))
    assert driver.run() == 0, driver.errors
    assert driver.faults.read_text() == "{}", "the engine never came to the point where it was to die"
    assert attempts(driver.store) == 1
    assert_sound(driver)
    assert driver.orphans() == []
