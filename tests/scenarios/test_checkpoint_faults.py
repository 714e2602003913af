"""Checkpoints that are damaged, or that the disk has no room for,
cost the steps since the newest whole one, and no more."""

from pathlib import Path

from storage import layout
from storage.attempts import read_attempt
from tests.scenarios.conftest import MakeDriver
from tests.scenarios.run_driver import RunDriver, assert_one_sentence, merged, newest_manifest
from tests.scenarios.soundness import assert_sound, attempts


def flip_a_byte(directory: Path) -> None:
    file = next(directory.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def truncate_the_manifest(directory: Path) -> None:
    file = directory / "MANIFEST.json"
    file.write_bytes(file.read_bytes()[:-40])


def lose_a_file(directory: Path) -> None:
    next(directory.glob("*.safetensors")).unlink()


def test_damaged_checkpoints_are_skipped_loudly_and_their_steps_made_again(make_driver: MakeDriver) -> None:
    driver = make_driver(settings={"checkpointing": {"save_period": 1, "keep_last": 4, "keep_top_k": 0}})
    assert driver.run() == 0, driver.errors
    damages = {6: flip_a_byte, 5: truncate_the_manifest, 4: lose_a_file}
    for step, damage in damages.items():
        directory = driver.store.local_path(layout.checkpoint(1, step))
        assert directory is not None
        damage(directory)
    # A finished run would have nothing to do.
    driver.recipe = merged(driver.recipe, {"grpo": {"max_num_steps": 7}})
    assert driver.run() == 0, driver.errors
    for step in damages:
        assert f"checkpoint 1/{step} is skipped: " in driver.errors
    assert read_attempt(driver.store, 2).parent == (1, 3)
    assert_sound(driver)
    assert driver.orphans() == []


def fill_the_disk_for(driver: RunDriver, attempt: int, step: int) -> None:
    """The file that this checkpoint will be written to has no room."""
    directory = driver.store.local_path(layout.checkpoint(attempt, step))
    assert directory is not None
    directory.mkdir(parents=True)
    (directory / "shard-00001-model-00001-of-00001.safetensors").symlink_to("/dev/full")


def test_full_disk_while_saving_ends_the_run_with_its_cause_and_loses_no_older_checkpoint(driver: RunDriver) -> None:
    # A trainer that fails is started again once.
    for attempt in (1, 2):
        fill_the_disk_for(driver, attempt, step=4)
    assert driver.run() == 1
    assert "saving the checkpoint of step 4 failed on rank 0: StoreFull: No space left to write" in driver.errors
    assert_one_sentence(driver.errors)
    assert attempts(driver.store) == 2 and newest_manifest(driver.store).step == 2
    assert driver.store.list(layout.checkpoint(2, 4), recursive=True) == []
    assert driver.run() == 0, driver.errors
    assert_sound(driver)
    assert driver.orphans() == []
