"""What the ranks of a group do in the tests of saving: steps, saves behind them, faults, and what a resume finds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grpo_core.recipe import parse
from grpo_core.training import checkpoint
from grpo_core.training.commands import Save
from grpo_core.training.model import Policy
from grpo_core.training.saving import SaveFailed, Saving
from storage.checkpoints import read_manifest
from storage.errors import StoreFull
from storage.objects import ObjectStore
from tests.grpo_core.training import ranks
from tests.grpo_core.training.ranks import CPU, make_plan, make_rows, moments, policy_of, weights

Learner = tuple[Policy, torch.optim.Optimizer]


def saving_of(store: ObjectStore, learner: Learner, **settings: Any) -> Saving:
    config = parse({"checkpointing": {"keep_last": 9, **settings}}, where="test")
    return Saving(config, store, 1, *learner, CPU)


def save_of(step: int) -> Save:
    facts = {"version": step, "frontier": {"cut": step}, "pinned": [[1, 0, 0]], "metrics": {"reward_mean": 0.5}}
    return Save(step, facts)


def take_step(number: int, learner: Learner) -> None:
    rows = make_rows(6, seed=number)
    ranks.step(make_plan(rows, number, token_budget=64), rows, *learner, "dapo")


def hold_writes(until: threading.Event) -> Callable[..., None]:
    """What takes the place of `checkpoint.write`, to begin only when it is told to."""
    write = checkpoint.write

    def held(*arguments: Any, **options: Any) -> None:
        assert until.wait(60)
        write(*arguments, **options)

    return held


def save_behind_steps(directory: Path, root: str, output: Path) -> None:
    """Checkpoints of steps 2 and 4 in the store, written while the next steps run, the first of them only after those;
    what each must be is written straight from the tensors, into `output`/STEP."""
    learner = policy_of(directory)
    told = threading.Event()
    write, checkpoint.write = checkpoint.write, hold_writes(told)
    with saving_of(ObjectStore.open(root), learner) as saving:
        for step in range(1, 7):
            take_step(step, learner)
            if step in (2, 4):
                (output / str(step)).mkdir(exist_ok=True)
                write(output / str(step), checkpoint.tensors_of(*learner))
                # The first is let go when two steps have changed what it copied; the second runs beside its steps.
                told.set() if step == 4 else told.clear()
                saving.start(save_of(step))


def save_to_a_full_disk(directory: Path, root: str, remote: bool) -> dict[str, str]:
    """The checkpoint of step 1 is written; that of step 2 meets a full disk on rank 1. What the save raised."""
    store = ObjectStore.open(root)
    learner = policy_of(directory)
    if remote:
        ObjectStore.local_path = lambda self, key: None  # type: ignore[method-assign]
    with saving_of(store, learner) as saving:
        saving.start(save_of(1))
        saving.wait()
        if remote and dist.get_rank() == 1:
            ObjectStore.upload = _full  # type: ignore[method-assign]
        saving.start(save_of(2))
        try:
            saving.wait()
        except SaveFailed as error:
            return {"failed": str(error)}
    return {}


def _full(self: ObjectStore, directory: Path, prefix: str) -> list[str]:
    raise StoreFull(f"No space left to write {prefix}: free some space, then continue the run.")


def save_for_a_resume(directory: Path, root: str, output: Path) -> list[float]:
    """A checkpoint of step 2 and, by another way, its state in `output`; what this rank draws next."""
    learner = policy_of(directory)
    torch.manual_seed(100 + dist.get_rank())
    for step in (1, 2):
        take_step(step, learner)
    with saving_of(ObjectStore.open(root), learner) as saving:
        saving.start(save_of(2))
        drawn = torch.rand(3).tolist()
    ranks.keep(output / "state.npz", weights(learner[0]) | moments(*learner))
    return drawn


def resume(directory: Path, root: str, output: Path) -> dict[str, Any]:
    """What this rank draws first when it has resumed, and the tensors that are not those of `output`."""
    store = ObjectStore.open(root)
    learner = policy_of(directory)
    checkpoint.resume(store, read_manifest(store, 1, 2), *learner, seed=5)
    return {
        "drawn": torch.rand(3).tolist(),
        "different": ranks.differences(output / "state.npz", weights(learner[0]) | moments(*learner)),
    }


def save_in_small_files(directory: Path, root: str, output: Path) -> list[str]:
    """A checkpoint of step 2 in files of 4 KiB, or of one larger tensor; what differs when it is loaded again."""
    checkpoint.FILE_BYTES = 4096
    save_for_a_resume(directory, root, output)
    return resume(directory, root, output)["different"]
