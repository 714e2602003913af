"""What the ranks of a group do in the test of the loop: follow rank 0's commands on a real store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from grpo_core.objective.losses import Denominators
from grpo_core.recipe import parse
from grpo_core.training.commands import Commands, Idle, Save, Step
from grpo_core.training.feed import PartCache
from grpo_core.training.loop import Rank, follow
from grpo_core.training.sharing import pack_groups
from grpo_core.training.step import FILLER, Place, StepPlan
from storage.objects import ObjectStore
from storage.trajectories import TrajectoryStore
from tests.grpo_core.training.ranks import CPU, policy_of

FRONTIER = {"cut": 1}


def _read_back(store: ObjectStore, key: str) -> tuple[int, str]:
    raise AssertionError(f"{key} is read back, only to be hashed")


def idle_step_save(policy_directory: Path, root: str, places: list[Place], length: int, remote: bool) -> dict[str, Any]:
    """The figures of the step as rank 0's commands got them; on the others, nothing.

    `remote`: the store does not say that it is a directory.
    """
    store = ObjectStore.open(root)
    ObjectStore.digest = _read_back  # type: ignore[method-assign]
    if remote:
        ObjectStore.local_path = lambda self, key: None  # type: ignore[method-assign]
    policy, optimizer = policy_of(policy_directory)
    rank = Rank(
        config=parse({"checkpointing": {"keep_last": 1, "keep_top_k": 0}}, where="test"),
        store=store,
        attempt=1,
        policy=policy,
        optimizer=optimizer,
        cache=PartCache(TrajectoryStore(store, 1)),
        device=CPU,
        transfer=None,
        canary=(),
    )
    heard: dict[str, Any] = {}

    def commands() -> Commands:
        heard["idle"] = yield Idle()
        sequences = [np.zeros(length)] * len(places)
        packed, fillers = pack_groups(sequences, None, rows=dist.get_world_size(), token_budget=64)
        advantages = [1.0, -1.0] * (len(places) // 2) + [0.0] * fillers
        for step in (1, 2):
            plan = StepPlan(
                step,
                places + [FILLER] * fillers,
                advantages,
                packed.micro_batches,
                0,
                Denominators(3.0 * len(places), float(len(places))),
                1e-3,
            )
            result = yield Step(plan)
            heard["rows"] = {index: len(values) for index, values in sorted(result.logprobs.items())}
            yield Save(step, {"version": step, "frontier": FRONTIER, "pinned": [[1, 0, 0]], "metrics": {"a": 0.5}})

    follow(rank, commands() if dist.get_rank() == 0 else None)
    return heard
