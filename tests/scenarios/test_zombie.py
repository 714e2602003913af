"""A writer that stood still while a newer attempt took its run over, and then goes on as if it still owned it."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from storage import layout
from tests.scenarios.engines import running_engine
from tests.scenarios.run_driver import RunDriver, interpreter_that_starts_the_model_engine
from tests.scenarios.soundness import assert_same_bits, assert_sound, attempts, checkpoint_tensors
from tests.scenarios.store_faults import Fault, Part

Tensors = dict[str, torch.Tensor]
END_SECONDS = 60.0
STOPS: dict[str, tuple[Part, str]] = {
    "trainer, before a ledger": ("trainer rank", r"create ledger/000001/.*step-000000003\.parquet"),
    "flow, before a part": ("flow", "create trajectories/000001/.*lease-000000009"),
}


def start_and_stop_both(driver: RunDriver, part: Part, write: str) -> subprocess.Popen[str]:
    """The flow of attempt 1, which stands still with its trainer: `part` right before this write."""
    driver.arm(Fault(part, write, "before", "stop"))
    first = driver.start()
    driver.wait_for_stop(part)
    for other in driver.find("trainer rank"):
        other.suspend()
    first.send_signal(signal.SIGSTOP)
    return first


def wake(driver: RunDriver, processes: list[int]) -> None:
    for process in driver.processes():
        if process.pid in processes:
            process.resume()


@pytest.mark.parametrize(("part", "write"), STOPS.values(), ids=STOPS)
def test_writer_that_wakes_up_under_a_newer_attempt_changes_nothing(
    synchronous: RunDriver, expected: Tensors, part: Part, write: str
) -> None:
    first = start_and_stop_both(synchronous, part, write)
    sleeping = [process.pid for process in synchronous.processes()]
    synchronous.start("--take-over")
    synchronous.wait_for(lambda store: attempts(store) == 2 and store.exists(layout.refit(2, 2)))
    wake(synchronous, sleeping)
    assert synchronous.finish() == 0, synchronous.errors
    assert first.wait(END_SECONDS) == 1
    assert attempts(synchronous.store) == 2, "a fenced flow started another trainer"
    assert_sound(synchronous)
    assert_same_bits(checkpoint_tensors(synchronous.store), expected)
    assert synchronous.orphans() == []


def test_checkpoint_of_an_older_attempt_that_comes_after_the_death_of_a_newer_one(
    synchronous: RunDriver, expected: Tensors
) -> None:
    first = start_and_stop_both(synchronous, "trainer rank", "create checkpoints/000001/.*step-000000002/MANIFEST")
    sleeping = [process.pid for process in synchronous.processes()]
    # The second attempt starts at 0, too, and is gone before its first checkpoint.
    synchronous.arm(Fault("flow", "create trajectories/000002/", "after", "kill", occurrence=2))
    synchronous.start("--take-over")
    assert synchronous.finish() == -9, synchronous.errors
    wake(synchronous, sleeping)
    assert first.wait(END_SECONDS) == 1
    assert synchronous.store.exists(layout.manifest(1, 2)), "the zombie has not committed what it was about to"
    assert synchronous.run() == 0, synchronous.errors
    assert_sound(synchronous)
    assert_same_bits(checkpoint_tensors(synchronous.store), expected)


@pytest.fixture
def sharing(synchronous: RunDriver, tmp_path: Path) -> Iterator[RunDriver]:
    """A synchronous run whose engine is not its own."""
    python = interpreter_that_starts_the_model_engine(synchronous.directory)
    with running_engine(synchronous, tmp_path, python=python) as url:
        synchronous.recipe["pool"] = {"kind": "external", "urls": [url], "start_timeout_seconds": 60}
        yield synchronous


def start_and_be_late_in_the_refit_of(driver: RunDriver, step: int) -> subprocess.Popen[str]:
    """Return when the engine has taken the weights of this step and the trainer waits to hear it."""
    driver.faults.write_text(json.dumps({"late_after_update": step + 1}))
    process = driver.start()
    driver.wait_for(lambda store: "late_after_update" not in driver.faults.read_text())
    return process


def test_engine_that_a_dead_attempt_left_paused_serves_the_next(sharing: RunDriver, expected: Tensors) -> None:
    start_and_be_late_in_the_refit_of(sharing, 3)
    sharing.kill("flow")
    assert sharing.orphans() == []
    assert sharing.run() == 0, sharing.errors
    assert_sound(sharing)
    assert_same_bits(checkpoint_tensors(sharing.store), expected)


def test_zombie_that_goes_on_with_its_refit_of_an_engine_of_a_newer_attempt(
    sharing: RunDriver, expected: Tensors
) -> None:
    first = start_and_be_late_in_the_refit_of(sharing, 3)
    for trainer in sharing.find("trainer rank"):
        trainer.suspend()
    first.send_signal(signal.SIGSTOP)
    sleeping = [process.pid for process in sharing.processes()]
    # The newer attempt is still generating when the older one wakes up.
    sharing.faults.write_text(json.dumps({"seconds_per_token": 0.2}))
    sharing.start("--take-over")
    sharing.wait_for(lambda store: attempts(store) == 2 and store.exists(layout.refit(2, 2)))
    wake(sharing, sleeping)
    assert sharing.finish() == 0, sharing.errors
    assert first.wait(END_SECONDS) == 1
    assert_sound(sharing)
    assert_same_bits(checkpoint_tensors(sharing.store), expected)
