"""Whole runs of the real command that nobody disturbs, and what may be done with them afterwards."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from grpo_core.metrics import finite, metric
from storage.layout import LedgerName
from storage.ledger import read_ledger_footer
from tests.scenarios.conftest import MakeDriver
from tests.scenarios.run_driver import RunDriver, assert_one_sentence
from tests.scenarios.soundness import assert_sound, attempts


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[RunDriver]:
    """A run that has reached its end, evaluated at both ends."""
    evaluation = {"at_start": True, "at_end": True, "samples": 8}
    driver = RunDriver(tmp_path_factory.mktemp("finished"), cache, {"evaluation": evaluation})
    try:
        assert driver.run() == 0, driver.errors
        yield driver
    finally:
        driver.clean_up()


def test_uninterrupted_run_accounts_for_every_ordinal(finished: RunDriver) -> None:
    assert_sound(finished)
    assert attempts(finished.store) == 1
    assert finished.output.count("held-out reward of version") == 2
    assert finished.orphans() == []


def test_every_figure_of_every_step_is_in_the_store_under_a_name_of_the_registry(finished: RunDriver) -> None:
    files = f"{finished.directory}/store/*/metrics/**/*.parquet"
    rows = duckdb.sql(f"SELECT step, name, value FROM '{files}' WHERE attempt = 1").fetchall()
    for number in range(1, 7):
        footer = read_ledger_footer(finished.store, LedgerName(1, number))
        measured = {name: value for step, name, value in rows if step == number and metric(name).scope == "step"}
        assert measured == finite(footer.metrics) and measured["trained_tokens"] > 0
    others = {name for _, name, _ in rows if metric(name).scope != "step"}
    assert {"evaluation/sampled", "evaluation/greedy", "pool/utilisation", "pool/held_back"} <= others


def test_second_call_on_a_finished_run_does_nothing(finished: RunDriver) -> None:
    directory = finished.directory / "store"
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*") if path.is_file()}
    process = finished.start()
    seen: set[int] = set()
    while process.poll() is None:
        seen |= {child.pid for child in finished.processes()}
    assert process.returncode == 0, finished.errors
    assert "finished: 6 steps" in finished.output
    assert seen <= {process.pid}, "a process was started"
    written = {path for path in directory.rglob("*") if path.is_file() and before.get(path) != path.stat().st_mtime_ns}
    assert {path.name for path in written} <= {"report.html"}


def test_changed_optimizer_is_refused_by_name(finished: RunDriver) -> None:
    assert finished.run("--set", "optimizer.learning_rate=0.5") == 1
    assert "optimizer.learning_rate" in finished.errors
    assert_one_sentence(finished.errors)
    assert attempts(finished.store) == 1
    assert finished.orphans() == []


def test_finished_run_goes_on_to_a_higher_number_of_steps(finished: RunDriver) -> None:
    finished.recipe["grpo"] = {**finished.recipe["grpo"], "max_num_steps": 8}
    assert finished.run() == 0, finished.errors
    assert attempts(finished.store) == 2
    assert_sound(finished)


def test_two_ranks_reach_the_end(make_driver: MakeDriver) -> None:
    driver = make_driver(settings={"training": {"ranks": 2}})
    driver.start()
    driver.wait_for(lambda store: len(driver.find("trainer rank")) == 2)
    assert driver.finish() == 0, driver.errors
    assert_sound(driver)
    assert driver.orphans() == []


def test_changed_tokenizer_is_refused_by_name(make_driver: MakeDriver, tmp_path: Path) -> None:
    driver = make_driver(settings={"grpo": {"max_num_steps": 1}})
    policy = shutil.copytree(driver.policy(), tmp_path / "policy")
    driver.recipe["model"] = {**driver.recipe["model"], "source": {"kind": "directory", "path": str(policy)}}
    assert driver.run() == 0, driver.errors
    template = policy / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant", "model"))
    driver.recipe["grpo"] = {**driver.recipe["grpo"], "max_num_steps": 2}
    assert driver.run() == 1
    assert "another tokenizer" in driver.errors
    assert_one_sentence(driver.errors)
    assert attempts(driver.store) == 1
