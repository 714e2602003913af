"""Datasets of every kind come to the end that is documented for them, however the run was disturbed."""

from typing import Any

import pytest

from storage.ledger import read_ledger
from storage.prompt_log import logged_prompts, recorded_chunks
from tests.scenarios.conftest import MakeDriver
from tests.scenarios.run_driver import RunDriver, steps_done
from tests.scenarios.soundness import assert_sound, attempts


def with_data(driver: RunDriver, source: dict[str, Any], **grpo: Any) -> RunDriver:
    driver.recipe["data"] = {"source": source}
    driver.recipe["grpo"] = {**driver.recipe["grpo"], "max_num_steps": 100, **grpo}
    return driver


def trained_ordinals(driver: RunDriver) -> list[int]:
    return sorted(row["ordinal"] for row in read_ledger(driver.store).to_pylist() if row["state"] == "trained")


def assert_nothing_is_left_to_do(driver: RunDriver, steps: int) -> None:
    before = attempts(driver.store)
    assert driver.run() == 0, driver.errors
    assert f"finished: {steps} steps" in driver.output
    assert attempts(driver.store) == before


def test_stream_killed_in_the_middle_is_resumed_from_its_record(make_driver: MakeDriver) -> None:
    source = {"kind": "stream", "function": "scenario_stream:sums", "arguments": {"count": 27}, "chunk_size": 4}
    driver = with_data(make_driver(), source, max_num_epochs=1)
    driver.start()
    driver.wait_for(steps_done(2))
    driver.kill("flow")
    assert recorded_chunks(driver.store) > 0
    assert driver.run() == 0, driver.errors
    assert attempts(driver.store) == 2
    assert logged_prompts(driver.store) == 27
    driver.recipe["grpo"]["max_num_steps"] = 6
    assert_sound(driver)
    # Three prompts do not fill a seventh step.
    assert trained_ordinals(driver) == list(range(24))
    driver.recipe["grpo"]["max_num_steps"] = 100
    assert_nothing_is_left_to_do(driver, 6)


@pytest.mark.parametrize("epochs", [2, 5])
def test_dataset_smaller_than_one_batch_is_gone_through_several_times(make_driver: MakeDriver, epochs: int) -> None:
    """Three prompts, four to a step: steps go across epochs, and what does not fill a step is not trained."""
    driver = make_driver()
    path = driver.directory / "few.jsonl"
    path.write_text('{"prompt": "1 + 1 ="}\n{"prompt": "2 + 2 ="}\n{"prompt": "3 + 3 ="}\n')
    with_data(driver, {"kind": "files", "path": str(path)}, max_num_epochs=epochs)
    assert driver.run() == 0, driver.errors
    steps = 3 * epochs // 4
    assert trained_ordinals(driver) == list(range(4 * steps))
    rows = read_ledger(driver.store).to_pylist()
    assert max(row["epoch"] for row in rows) == (4 * steps - 1) // 3
    assert_nothing_is_left_to_do(driver, steps)
