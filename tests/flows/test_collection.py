"""`forebay gc`, from the command line and as a flow."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from prefect.logging import disable_run_logger
from rich.console import Console
from typer.testing import CliRunner

from flows import cli
from flows.collection import collect_garbage, render_collection
from flows.maintain import gc
from flows.run import RunRefused
from flows.views.history import ledger_lines
from flows.views.status import status
from flows.views.trace import trace
from grpo_core.config import StorageConfig
from storage import layout
from storage.objects import ObjectStore
from tests.flows.synthetic_run import SyntheticRun, small_run

NOW = 4e9  # long after everything was written


@pytest.fixture
def run(tmp_path: Path) -> SyntheticRun:
    """In its oldest checkpoint only the first two leases of attempt 1 are settled; its last one is a dead branch."""
    return small_run(ObjectStore.open(str(tmp_path / "synthetic")))


def everything(store: ObjectStore) -> list[str]:
    return store.list("", recursive=True)


def test_a_dry_run_shows_and_deletes_nothing(run: SyntheticRun) -> None:
    before = everything(run.store)
    found = collect_garbage(run.store, now=NOW, dry_run=True)
    assert [(item.name, item.reason) for item in found.garbage] == [
        ("1/0", "settled in checkpoint 1/2"),
        ("1/1", "settled in checkpoint 1/2"),
        ("1/3", "dead branch"),
    ]
    assert everything(run.store) == before
    assert found.bytes == sum(run.store.size(layout.part(1, lease, 0)) for lease in (0, 1, 3))


def test_a_collection_changes_nothing_that_a_run_says_of_itself(run: SyntheticRun) -> None:
    before = everything(run.store)
    told = status(run.store), ledger_lines(run.store, True)
    found = collect_garbage(run.store, now=NOW)
    assert sorted(set(before) - set(everything(run.store))) == sorted(
        key for item in found.garbage for key in item.keys
    )
    assert (status(run.store), ledger_lines(run.store, True)) == told
    assert trace(run.store, 0)["leases"][0]["parts"][0]["collected"]
    assert collect_garbage(run.store, now=NOW).garbage == ()


def test_people_see_counts_and_bytes_by_reason(run: SyntheticRun) -> None:
    run.store.put(layout.manifest(1, 1), b"{")
    target = io.StringIO()
    Console(file=target, width=160).print(render_collection(collect_garbage(run.store, now=NOW, dry_run=True)))
    text = target.getvalue()
    assert "0 objects, 0.0 MiB, would be deleted" in text
    assert "the manifest of checkpoint 1/1 cannot be read: no lease of attempt 1 or an older one is collected" in text
    run.store.delete(layout.manifest(1, 1))
    Console(file=target, width=160).print(render_collection(collect_garbage(run.store, now=NOW, dry_run=True)))
    assert "settled in checkpoint 1/2" in target.getvalue() and "3 objects" in target.getvalue()


def test_the_command_prints_json(run: SyntheticRun, tmp_path: Path) -> None:
    arguments = ["gc", "synthetic", "--root", str(tmp_path), "--json"]
    dry = json.loads(CliRunner().invoke(cli.app, [*arguments, "--dry-run"]).stdout)
    # What a dead branch wrote a moment ago is left for the grace time.
    assert [item["name"] for item in dry["garbage"]] == ["1/0", "1/1"] and dry["dry_run"]
    assert run.store.exists(layout.part(1, 0, 0))
    done = json.loads(CliRunner().invoke(cli.app, arguments).stdout)
    assert done == {**dry, "dry_run": False}
    assert not run.store.exists(layout.part(1, 0, 0)) and run.store.exists(layout.part(1, 3, 0))


def test_the_flow_does_the_same(run: SyntheticRun, tmp_path: Path) -> None:
    with disable_run_logger():
        found = gc.fn("synthetic", StorageConfig(root=str(tmp_path)))
    assert [item["name"] for item in found["garbage"]] == ["1/0", "1/1"]
    assert not run.store.exists(layout.part(1, 0, 0))


def test_without_a_run_there_is_nothing_to_collect(tmp_path: Path) -> None:
    with pytest.raises(RunRefused, match="there is no run"):
        collect_garbage(ObjectStore.open(str(tmp_path / "empty")), now=NOW)
    new = SyntheticRun(ObjectStore.open(str(tmp_path / "new")))
    assert collect_garbage(new.store, now=NOW).garbage == ()


def test_the_best_by_evaluation_is_kept(tmp_path: Path) -> None:
    kept = {"keep_last": 1, "keep_top_k": 1, "metric_name": "evaluation/greedy"}
    run = SyntheticRun(ObjectStore.open(str(tmp_path / "run")), checkpointing=kept)
    run.claim()
    for step in range(1, 5):
        ordinals = [2 * step - 2, 2 * step - 1]
        run.arrive(run.lease(ordinals), {ordinal: [1, 0] for ordinal in ordinals}, last=True)
        run.step(ordinals)
        run.evaluate(step, sampled=[0.0], greedy=[1.0 if step == 2 else 0.0])
        run.checkpoint()
    found = collect_garbage(run.store, now=NOW, dry_run=True)
    assert [item.name for item in found.garbage if item.kind == "checkpoint"] == ["1/1", "1/3"]
