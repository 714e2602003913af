"""What cannot work is said in one sentence, with a non-zero exit status, and leaves neither process nor half a run."""

import socket
from pathlib import Path
from typing import Any

import pytest

from storage import layout
from storage.attempts import attempt_numbers
from tests.scenarios.conftest import MakeDriver
from tests.scenarios.run_driver import RunDriver, assert_one_sentence, script


def assert_refused(driver: RunDriver, *words: str) -> None:
    """The command ends with status 1, says these words, and no trainer was ever started."""
    assert driver.run() == 1, driver.errors
    for word in words:
        assert word in driver.errors
    assert "Traceback" not in driver.errors
    assert driver.orphans() == []
    if (driver.directory / "store").is_dir():
        assert attempt_numbers(driver.store) == []


def test_reward_function_that_cannot_be_imported_leaves_no_run(make_driver: MakeDriver) -> None:
    driver = make_driver(settings={"rewards": {"functions": [{"function": "no_such_module:score"}]}})
    assert_refused(driver, "no_such_module:score", "No module named")
    assert_one_sentence(driver.errors)
    assert not driver.store.exists(layout.run()), "the corrected recipe would be refused"


def test_reward_function_that_raises_ends_the_run_with_its_own_words(make_driver: MakeDriver) -> None:
    driver = make_driver(settings={"rewards": {"functions": [{"function": "scenario_rewards:raising"}]}})
    assert driver.run() == 1
    assert "the grader is out of order" in driver.errors
    assert "scenario_rewards:raising" in driver.errors
    assert "Traceback" not in driver.errors
    assert driver.orphans() == []


def test_missing_model_directory(driver: RunDriver, tmp_path: Path) -> None:
    missing = tmp_path / "no-model"
    driver.recipe["model"] = {**driver.recipe["model"], "source": {"kind": "directory", "path": str(missing)}}
    assert_refused(driver, str(missing), "does not exist")
    assert_one_sentence(driver.errors)
    assert not driver.store.exists(layout.run())


def test_busy_port(make_driver: MakeDriver) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        driver = make_driver(settings={"pool": {"port": port}})
        assert_refused(driver, str(port), "pool.port=0")
        assert_one_sentence(driver.errors)


def test_engine_that_dies_while_it_starts_shows_its_last_lines(make_driver: MakeDriver, tmp_path: Path) -> None:
    python = script(tmp_path / "python", "echo 'no such architecture: Qwen99'\nexit 3\n")
    driver = make_driver(settings={"pool": {"python": str(python)}})
    assert_refused(driver, "engine-0", "status 3", "no such architecture: Qwen99")


def test_store_that_cannot_be_written(make_driver: MakeDriver, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    driver = make_driver(settings={"storage": {"root": str(tmp_path / "file" / "store")}})
    assert_refused(driver, str(tmp_path / "file"))
    assert_one_sentence(driver.errors)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"grpo": {"num_promts_per_step": 4}}, ["grpo.num_promts_per_step"]),
        ({"optimizer": {"learning_rate": -1}}, ["optimizer.learning_rate", "-1"]),
    ],
    ids=["unknown", "out-of-range"],
)
def test_recipe_that_is_wrong_leaves_no_store(
    make_driver: MakeDriver, settings: dict[str, Any], words: list[str]
) -> None:
    driver = make_driver(settings=settings)
    assert_refused(driver, *words)
    assert not (driver.directory / "store").exists()
