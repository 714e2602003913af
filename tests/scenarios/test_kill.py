"""Kill −9 of any process at any moment, then the same command: nothing lost, nothing twice, nothing stale."""

import json

import pytest

from tests.scenarios.run_driver import Part, RunDriver, checkpoint_committed, steps_done
from tests.scenarios.soundness import assert_sound, attempts

# The cold refit is the first weight update of an engine, so that of step s is number s + 1.
UPDATE_OF_STEP_4 = 5


def stall_in_the_refit_of_step_4(driver: RunDriver) -> None:
    """Start, and return when step 4 is in the ledger, its weights are half-way, and it has no checkpoint yet."""
    driver.faults.write_text(json.dumps({"stall_in_update": UPDATE_OF_STEP_4}))
    driver.start()
    driver.wait_for_stall()
    assert steps_done(4)(driver.store) and not checkpoint_committed(4)(driver.store)


def test_flow_killed_before_its_first_checkpoint_begins_again(driver: RunDriver) -> None:
    driver.start()
    driver.wait_for(steps_done(1))
    driver.kill("flow")
    assert driver.orphans() == []
    assert driver.run() == 0, driver.errors
    assert_sound(driver)
    assert driver.orphans() == []


def test_flow_killed_in_a_refit_after_the_ledger_and_before_the_checkpoint(driver: RunDriver) -> None:
    stall_in_the_refit_of_step_4(driver)
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
    stall_in_the_refit_of_step_4(driver)
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


def test_flow_killed_twice_in_a_row(driver: RunDriver) -> None:
    driver.start()
    driver.wait_for(checkpoint_committed(2))
    driver.kill("flow")
    driver.start()
    driver.wait_for(lambda store: attempts(store) == 2)
    driver.kill("flow")
    assert driver.run() == 0, driver.errors
    assert attempts(driver.store) == 3
    assert_sound(driver)
