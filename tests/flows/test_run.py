"""A run is recorded once, continued under its rules, and owned by one flow at a time."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.run import RunRefused, check_owner, claim_attempt, finished_run, open_run
from grpo_core.config import RunConfig
from grpo_core.prompts import Row, Splits
from grpo_core.recipe import ConfigError
from storage import layout, schema
from storage.attempts import claim_next
from storage.checkpoints import Manifest, commit_manifest
from storage.errors import Fenced
from storage.ledger import LedgerWriter, Totals, ledger_rows
from storage.objects import ObjectStore
from storage.records import read_record, write_record

SPLITS = Splits([Row([{"role": "user", "content": f"{number} + 1 ="}], {}) for number in range(40)], [])


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore.open(str(tmp_path / "run"))


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(sections)


def record(store: ObjectStore, settings: RunConfig, *, splits: Splits = SPLITS, tokenizer: str = "t") -> Any:
    return open_run(settings, store, splits, tokenizer_digest=tokenizer, canary=[1, 2, 3])


def claim(store: ObjectStore, pid: int, started: float, host: str | None = None) -> None:
    owner = {"host": host or socket.gethostname(), "pid": pid, "pid_started_at": started, "claimed_at": time.time()}
    claim_next(store, parent=None, **owner)


def test_a_run_may_go_on_for_longer_and_elsewhere(store: ObjectStore) -> None:
    record(store, config(grpo={"max_num_steps": 10}))
    again = record(store, config(grpo={"max_num_steps": 20}, pool={"kind": "local", "engines": 2}))
    assert again.window.last_step() == 20
    assert again.changes == {"grpo.max_num_steps": 20, "pool.engines": 2}


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"settings": config(optimizer={"learning_rate": 0.1})}, "optimizer.learning_rate"),
        ({"splits": Splits(SPLITS.train[1:], [])}, "dataset"),
        ({"tokenizer": "other"}, "tokenizer"),
    ],
)
def test_what_is_learnt_may_not_change(store: ObjectStore, changed: dict[str, Any], name: str) -> None:
    record(store, config())
    with pytest.raises(RunRefused, match=name):
        record(store, **{"settings": config(), **changed})


def test_too_little_data_for_one_step_is_refused(store: ObjectStore) -> None:
    with pytest.raises(RunRefused, match="do not fill one step"):
        record(store, config(grpo={"max_num_epochs": 1, "num_prompts_per_step": 64}))


def test_a_record_of_another_version_is_named_and_not_guessed_at(store: ObjectStore) -> None:
    record(store, config())
    fields = read_record(store, layout.run())
    store.delete(layout.run())
    write_record(store, layout.run(), {**fields, "config": {**fields["config"], "telepathy": True}})
    with pytest.raises(ConfigError, match=r"run\.json of .*telepathy"):
        finished_run(config(), store)


def test_a_living_owner_is_not_disturbed(store: ObjectStore) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        claim(store, sleeper.pid, psutil.Process(sleeper.pid).create_time())
        with pytest.raises(RunRefused, match=str(sleeper.pid)):
            check_owner(store, take_over=False)
        assert check_owner(store, take_over=True) == 1
    finally:
        sleeper.kill()
        sleeper.wait()
    assert check_owner(store, take_over=False) == 1


def test_a_reused_process_number_is_not_the_owner(store: ObjectStore) -> None:
    claim(store, os.getppid(), started=1.0)
    assert check_owner(store, take_over=False) == 1


def test_an_owner_on_another_host_is_alive_while_it_writes(store: ObjectStore) -> None:
    claim(store, 1, 1.0, host="elsewhere")
    with pytest.raises(RunRefused, match="elsewhere"):
        check_owner(store, take_over=False)
    store.put(layout.progress(1, "flow"), b'{"at": 0}')
    assert check_owner(store, take_over=False) == 1


def test_an_attempt_that_somebody_else_claimed_meanwhile_is_not_fenced_unseen(store: ObjectStore) -> None:
    run = record(store, config())
    found = check_owner(store, take_over=False)
    claim(store, os.getpid(), 1.0)
    with pytest.raises(Fenced):
        claim_attempt(run, None, after=found)
    assert claim_attempt(run, None, after=1).attempt == 2


def end_step(store: ObjectStore, step: int, *, trained: int, dropped: int, checkpoint: bool = True) -> None:
    """Leave a run as its trainer does after `step`: what it dropped afterwards is ledgered under the next step."""
    writer, none = LedgerWriter(store, 1), ledger_rows([])
    writer.write_step(step, none, Totals(trained=trained), {})
    if dropped:
        writer.write_drops(step + 1, none, Totals(trained=trained, dropped={"end_of_data": dropped}))
    if checkpoint:
        commit_manifest(store, Manifest(1, step, step, {}, {}, 0.0))


@pytest.mark.parametrize(
    ("step", "dropped", "checkpoint", "finished"),
    [(10, 0, True, 10), (9, 0, True, None), (9, 4, True, 9), (8, 4, True, None), (10, 0, False, None)],
    ids=["last step", "one to go", "data used up by drops", "data for one step more", "last step not saved"],
)
def test_a_run_is_finished_with_its_last_step_or_when_its_data_fill_no_other(
    store: ObjectStore, step: int, dropped: int, checkpoint: bool, finished: int | None
) -> None:
    """40 prompts, once, in steps of four."""
    grpo = {"num_prompts_per_step": 4, "max_num_epochs": 1}
    settings = config(grpo=grpo, evaluation={"at_end": False})
    record(store, settings)
    claim(store, 1, 1.0)
    end_step(store, step, trained=4 * step, dropped=dropped, checkpoint=checkpoint)
    assert finished_run(settings, store) == finished


@pytest.mark.parametrize(
    ("threshold", "saved", "finished"),
    [(0.5, True, 6), (0.5, False, None), (0.6, True, None), (None, True, None)],
    ids=["reached", "not saved yet", "not reached", "no goal"],
)
def test_a_run_is_finished_with_its_goal(
    store: ObjectStore, threshold: float | None, saved: bool, finished: int | None
) -> None:
    """Version 4 scored 0.5, and version 0 better, which does not count; step 6 is the newest."""
    goal = {} if threshold is None else {"stop_metric": "greedy", "stop_threshold": threshold}
    settings = config(evaluation={"at_end": False, "every_steps": 4, **goal})
    record(store, config())
    claim(store, 1, 1.0)
    for version, reward in ((0, 1.0), (4, 0.5)):
        evaluate(store, 1, version, reward)
    end_step(store, 6, trained=24, dropped=0, checkpoint=saved)
    assert finished_run(settings, store) == finished
    due = config(evaluation={"at_end": False, "every_steps": 2, **goal})
    assert finished_run(due, store) is None, "the evaluation due at version 6 is missing"


def evaluate(store: ObjectStore, attempt: int, version: int, reward: float) -> None:
    row = {"version": version, "dataset_index": 0, "mode": "greedy", "reward": reward, "prompt": "[]"}
    row |= {"completion": "", "tokens": 1, "finish_reason": "stop"}
    data = schema.encode(schema.table([row], schema.EVALUATION), schema.EVALUATION, {})
    assert store.put_if_absent(layout.evaluation(attempt, version), data)
