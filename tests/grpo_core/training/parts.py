"""Leases and parts of a run in a temporary store, as the generation side would leave them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from grpo_core.config import RunConfig
from grpo_core.schedule.frontier import Frontier
from grpo_core.training.batch import Row
from grpo_core.training.feed import Feed, Lineage, PartCache
from grpo_core.training.planning import teaches
from storage import schema
from storage.attempts import claim_next, living_chain
from storage.layout import PartName
from storage.leases import LeaseRecord, write_lease
from storage.objects import ObjectStore
from storage.trajectories import TrajectoryStore

ROLLOUTS = 2
PROMPT, COMPLETION = 2, 3


def group(
    ordinal: int,
    *,
    versions: Sequence[int] = (0,),
    rewards: Sequence[float | None] = (0.0, 1.0),
    completion: int = COMPLETION,
    attempt: int = 1,
    engine: str = "e0",
) -> list[dict[str, Any]]:
    """The rows of one group. Each version sampled one token, the last one the rest."""
    length = PROMPT + completion
    starts = [PROMPT + place for place in range(len(versions))]
    spans = [
        {"attempt": attempt, "version": version, "start": start, "end": end}
        for version, start, end in zip(versions, starts, [*starts[1:], length], strict=True)
    ]
    facts = {
        "token_ids": [ordinal % 50] * length,
        "loss_mask": [place >= PROMPT for place in range(length)],
        "logprobs": [0.0] * PROMPT + [-0.5] * completion,
        "version_spans": spans,
        "prompt_length": PROMPT,
        "status": "ok",
        "finish_reason": "stop",
        "engine": engine,
    }
    return [_row(ordinal, rollout, reward=reward, **facts) for rollout, reward in enumerate(rewards)]


def tombstone(ordinal: int, error: str = "RolloutFailed: no engine") -> list[dict[str, Any]]:
    empty = {"token_ids": [], "loss_mask": [], "logprobs": [], "version_spans": [], "prompt_length": 0}
    return [_row(ordinal, 0, status="failed", error=error, finish_reason="error", **empty)]


def _row(ordinal: int, rollout: int, **facts: Any) -> dict[str, Any]:
    return {
        "run_id": "run",
        "attempt": 0,
        "lease": 0,
        "part": 0,
        "ordinal": ordinal,
        "group_id": f"run-{ordinal}",
        "rollout": rollout,
        "sequence": 0,
        "epoch": ordinal // 10,
        "dataset_index": ordinal % 10,
        "environment": "files",
        "engine": "e0",
        "messages": "[]",
        "turns": 1,
        "tool_calls": 0,
        "tool_failures": 0,
        **facts,
    }


@dataclass
class Run:
    """A run of one attempt at a time: `lease` and `arrive` play the flow, `feed` is the trainer's view."""

    store: ObjectStore
    attempt: int
    feed: Feed
    trajectories: TrajectoryStore
    leases: int = 0
    parts: dict[int, int] = field(default_factory=dict)

    @classmethod
    def start(
        cls,
        root: Path,
        *,
        parent: tuple[int, int] | None = None,
        frontier: Frontier | None = None,
        least: int = ROLLOUTS,
        recipe: dict[str, Any] | None = None,
    ) -> Run:
        store = ObjectStore.open(str(root))
        claim = claim_next(store, parent=parent, host="here", pid=1, pid_started_at=0.0, claimed_at=0.0)
        trajectories = TrajectoryStore(store, claim.attempt)
        feed = Feed(
            store,
            trajectories,
            claim.attempt,
            frontier or Frontier(),
            PartCache(trajectories),
            rollouts=ROLLOUTS,
            least=least,
            lineage=Lineage.of(living_chain(store), every_steps=1),
            teaches=partial(teaches, config=RunConfig.model_validate(recipe or {})),
        )
        return cls(store, claim.attempt, feed, trajectories)

    def lease(
        self,
        *ordinals: int,
        failure_counts: dict[int, int] | None = None,
        target_step: int | None = None,
        version: int = 0,
    ) -> int:
        number = self.leases
        stamp = f"{self.attempt}.{version}"
        record = LeaseRecord(self.attempt, number, ordinals, 0.0, stamp, target_step, failure_counts or {})
        write_lease(self.store, record)
        self.leases += 1
        return number

    def arrive(
        self, lease: int, *groups: list[dict[str, Any]], last: bool = False, returned: Sequence[int] = ()
    ) -> PartName:
        """Commit these groups as the next part of the lease."""
        table = schema.table([row for rows in groups for row in rows], schema.SHARD)
        number = self.parts.get(lease, 0)
        assert self.trajectories.write_part(lease, number, table, last=last, returned=returned)
        self.parts[lease] = number + 1
        return PartName(self.attempt, lease, number)

    def whole(self, *groups: list[dict[str, Any]], target_step: int | None = None) -> PartName:
        """A lease of these groups that is finished."""
        ordinals = (rows[0]["ordinal"] for rows in groups)
        return self.arrive(self.lease(*ordinals, target_step=target_step), *groups, last=True)

    def rows(self, ordinal: int) -> list[Row]:
        return self.feed.cache.rows(self.feed.groups[ordinal].places())
