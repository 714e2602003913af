"""All ranks carry out rank 0's commands, and a save is one whole, verified checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_core.recipe import parse
from grpo_core.training import loop
from grpo_core.training.loop import Rank, refit_settings
from grpo_core.training.step import Place
from storage import layout
from storage.checkpoints import Manifest, commit_manifest, committed, verify
from storage.errors import Fenced
from storage.layout import CheckpointName, PartName
from storage.objects import ObjectStore
from tests.grpo_core import tiny
from tests.grpo_core.training import follow, ranks
from tests.grpo_core.training.parts import Run, group


@pytest.mark.parametrize(("world", "fillers", "remote"), [(1, 0, False), (3, 1, False), (3, 1, True)])
def test_ranks_follow_to_a_checkpoint_that_is_whole(tmp_path: Path, world: int, fillers: int, remote: bool) -> None:
    policy = tiny.make(tmp_path / "policy")
    run = Run.start(tmp_path / "store")
    part = run.whole(group(0))
    places = [Place(layout.part(part.attempt, part.lease, part.part), row) for row in (0, 1)]
    heard, *others = ranks.run(world, follow.idle_step_save, policy, str(tmp_path / "store"), places, 5, remote)
    assert others == [{}] * (world - 1)
    assert heard["idle"] is None
    # Rank 0 has the log-probs of every rank's rows; those of a filler are none.
    assert heard["rows"] == {0: 3, 1: 3} | {2 + index: 0 for index in range(fillers)}
    assert committed(run.store) == [CheckpointName(1, 2)]
    manifest = verify(run.store, 1, 2)
    assert (manifest.version, manifest.frontier, manifest.pinned) == (2, follow.FRONTIER, (PartName(1, 0, 0),))
    assert len(manifest.extra["random_states"]) == world
    assert manifest.metrics == {"a": 0.5}
    assert {name.rsplit(".", 1)[1] for name in manifest.files} <= {"safetensors", "json"}


def rank_zero(store: ObjectStore, attempt: int) -> Rank:
    """As far as retention looks at it."""
    nothing: Any = None
    config = parse({"checkpointing": {"keep_last": 1, "keep_top_k": 0}}, where="test")
    return Rank(config, store, attempt, nothing, nothing, nothing, (), nothing, None)


def checkpoint(store: ObjectStore, attempt: int, step: int) -> None:
    commit_manifest(store, Manifest(attempt, step, step, {}, {}, 0.0))


def test_retention_keeps_parents_and_steps_over_what_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Run.start(tmp_path)
    for step in (1, 2, 3):
        checkpoint(first.store, 1, step)
    Run.start(tmp_path, parent=(1, 2))
    for step in (4, 5):
        checkpoint(first.store, 2, step)
    first.store.put(layout.manifest(1, 1), b"{}")
    loop._retain(rank_zero(first.store, 2))
    assert committed(first.store) == [CheckpointName(1, 1), CheckpointName(1, 2), CheckpointName(2, 5)]
    assert "checkpoint 1.1 is left where it is" in capsys.readouterr().err


def test_a_fenced_trainer_deletes_no_checkpoint(tmp_path: Path) -> None:
    run = Run.start(tmp_path)
    for step in (1, 2):
        checkpoint(run.store, 1, step)
    Run.start(tmp_path)
    with pytest.raises(Fenced):
        loop._retain(rank_zero(run.store, 1))
    assert committed(run.store) == [CheckpointName(1, 1), CheckpointName(1, 2)]


@pytest.mark.parametrize(("backend", "digests"), [("gloo", True), ("nccl", False), ("ipc", False)])
def test_digests_are_computed_for_the_engines_that_check_them(backend: str, digests: bool) -> None:
    device = "cpu" if backend == "gloo" else "cuda"
    settings = {
        "refit": {"backend": backend},
        "training": {"device": device},
        "pool": {"kind": "local", "device": device},
    }
    assert refit_settings(parse(settings, where="test")).digests is digests
