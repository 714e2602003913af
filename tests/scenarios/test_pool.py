"""Engines die, come and go while a run goes on, and weights take the way through the store:
nothing is lost or twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from grpo_core.ports import free_port
from storage.objects import ObjectStore
from storage.pool import read_pool_changes, read_refit
from storage.weights import published
from tests import model_engine
from tests.scenarios.conftest import MakeDriver
from tests.scenarios.run_driver import FOREBAY, MARK, REPOSITORY, RunDriver, steps_done
from tests.scenarios.soundness import assert_sound, attempts, engines_of

# A step then takes about twenty seconds, in which an engine can be started.
SLOWLY, QUICKLY = {"seconds_per_token": 2.0}, {"seconds_per_token": 0.02}


@contextmanager
def external_engine(driver: RunDriver) -> Iterator[str]:
    """One more engine with the run's policy, which somebody else started; its URL."""
    engine = next(process for process in driver.find("engine"))
    words = engine.cmdline()
    model, port = words[words.index("--model") + 1], free_port("127.0.0.1")
    command = [sys.executable, model_engine.__file__, "--model", model, "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), MARK: str(driver.directory), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env={**environment, model_engine.FAULTS: str(driver.faults)}) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def wish(driver: RunDriver, *options: str) -> None:
    command = [FOREBAY, "pool", driver.recipe["run_id"], "--root", driver.recipe["storage"]["root"], *options]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, timeout=120)


def changes(store: ObjectStore) -> list[list[str]]:
    """Who joined and who left, in order."""
    return [[*change.joined, *(f"-{name}" for name in change.left)] for change in read_pool_changes(store, 1)]


def test_one_of_two_engines_dies_in_the_middle_of_a_refit(make_driver: MakeDriver) -> None:
    driver = make_driver(settings={"pool": {"engines": 2}})
    driver.faults.write_text(json.dumps({"die_in_update": 3}))
    assert driver.run() == 0, driver.errors
    assert driver.faults.read_text() == "{}", "no engine came to the point where it was to die"
    assert attempts(driver.store) == 1
    assert_sound(driver)
    assert {"engine-0", "engine-1"} <= engines_of(driver.store)
    assert driver.orphans() == []


def test_an_engine_is_added_and_another_removed_in_mid_run(make_driver: MakeDriver) -> None:
    driver = make_driver(settings={"grpo": {"max_num_steps": 40}})
    driver.faults.write_text(json.dumps(SLOWLY))
    driver.start()
    driver.wait_for(lambda store: read_refit(store, 1, 0) is not None)
    own = read_pool_changes(driver.store, 1)[0].joined["engine-0"]
    with external_engine(driver) as url:
        wish(driver, "--add", url)
        driver.wait_for(lambda store: ["engine-1"] in changes(store))
        wish(driver, "--remove", own)
        driver.wait_for(lambda store: ["-engine-0"] in changes(store))
        driver.faults.write_text(json.dumps(QUICKLY))
        assert driver.finish() == 0, driver.errors
    assert changes(driver.store) == [["engine-0"], ["engine-1"], ["-engine-0"]]
    assert "engine-1" in engines_of(driver.store)
    assert attempts(driver.store) == 1
    assert_sound(driver)


def test_weights_through_the_store_survive_a_kill(make_driver: MakeDriver) -> None:
    driver = make_driver(settings={"refit": {"backend": "store", "full_every": 3}, "pool": {"engines": 2}})
    driver.start()
    driver.wait_for(steps_done(3))
    driver.kill("flow")
    assert driver.orphans() == []
    assert driver.run() == 0, driver.errors
    assert_sound(driver)
    assert [published(driver.store, attempt) for attempt in (1, 2)][0] == []
    assert published(driver.store, 2)[-1] == driver.recipe["grpo"]["max_num_steps"]
    shelf: Path = driver.cache / "weights"
    assert [len(list(run.glob("*.safetensors"))) for run in shelf.glob(f"{driver.recipe['run_id']}-*")] == [2]


@pytest.mark.parametrize("fault", ["die_in_update", "stall_in_update"])
def test_an_engine_that_fails_to_load_from_the_store_is_replaced(make_driver: MakeDriver, fault: str) -> None:
    driver = make_driver(settings={"refit": {"backend": "store", "transfer_timeout_seconds": 3}})
    driver.faults.write_text(json.dumps({fault: 3}))
    assert driver.run() == 0, driver.errors
    assert driver.faults.read_text() == "{}"
    assert_sound(driver)
    assert engines_of(driver.store) == {"engine-0", "engine-0-1"}
