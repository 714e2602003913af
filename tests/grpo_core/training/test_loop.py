"""All ranks carry out rank 0's commands, and a save is one whole, verified checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_core.recipe import parse
from grpo_core.training.loop import refit_settings
from grpo_core.training.step import Place
from storage import layout
from storage.checkpoints import committed, verify
from storage.layout import CheckpointName, PartName
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


@pytest.mark.parametrize(("backend", "digests"), [("gloo", True), ("nccl", False), ("ipc", False)])
def test_digests_are_computed_for_the_engines_that_check_them(backend: str, digests: bool) -> None:
    device = "cpu" if backend == "gloo" else "cuda"
    settings = {
        "refit": {"backend": backend},
        "training": {"device": device},
        "pool": {"kind": "local", "device": device},
    }
    assert refit_settings(parse(settings, where="test")).digests is digests
