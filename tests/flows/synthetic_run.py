"""Runs written by hand through the real storage API: every state an ordinal can be in, without engine or trainer.

`SyntheticRun` plays flow and trainer at once, one event per call. `small_run` is two attempts with a dead branch:

    ordinal   0 1 2   3        4 5 6 7 8 9   10       11      12         13        14
    ends as   trained dropped  trained       dropped  trained in flight  buffered  returned
"""

from __future__ import annotations

import json
import math
import os
import random
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import psutil

from grpo_core.config import RunConfig
from grpo_core.schedule.frontier import Frontier, FrontierState
from grpo_core.schedule.window import Window
from storage import layout, schema
from storage.attempts import claim_next
from storage.checkpoints import Manifest, commit_manifest, read_manifest
from storage.layout import PartName
from storage.leases import LeaseRecord, write_lease
from storage.ledger import LedgerWriter, Totals, ledger_rows
from storage.objects import ObjectStore
from storage.pool import RefitRecord, write_refit
from storage.records import write_record
from storage.trajectories import TrajectoryStore

HOSTILE = "<script>alert('x')</script> [red]markup[/red] \x1b[31mred \u202ebackwards"
PROMPT_TOKENS = 2
BEGAN = 1_700_000_000.0


class SyntheticRun:
    """One run in `store`. `frontier` follows every event exactly, so tests can compare with it."""

    def __init__(
        self, store: ObjectStore, *, steps: int = 8, prompts_per_step: int = 2, generations: int = 2, **config: Any
    ) -> None:
        grpo = {
            "max_num_steps": steps,
            "num_prompts_per_step": prompts_per_step,
            "num_generations_per_prompt": generations,
        }
        self.config = RunConfig.model_validate({"run_id": "synthetic", "grpo": grpo, **config})
        self.store = store
        self.window = Window.of(self.config.grpo, self.config.refit, prompts=1000)
        self.random = random.Random(0)
        self.clock = BEGAN
        write_record(
            store,
            layout.run(),
            {"format": 1, "config": self.config.model_dump(mode="json"), "digests": {}, "prompts": 1000},
        )

    def claim(
        self, parent: tuple[int, int] | None = None, *, host: str = "elsewhere", pid: int = 1, since: float = BEGAN
    ) -> None:
        """A new attempt, from the checkpoint `parent` or from nothing."""
        before: Manifest | None = None if parent is None else read_manifest(self.store, *parent)
        claim = claim_next(self.store, parent=parent, host=host, pid=pid, pid_started_at=since, claimed_at=BEGAN)
        self.attempt = claim.attempt
        self.trajectories = TrajectoryStore(self.store, self.attempt)
        self.ledger = LedgerWriter(self.store, self.attempt)
        self.lease_number = 0
        self.done = 0 if before is None else before.step
        self.frontier = Frontier() if before is None else Frontier.resume(FrontierState.from_json(before.frontier))
        if parent is None:
            self.totals, self.parts, self.saved = Totals(), {}, {}
        else:
            totals, parts = self.saved[parent]
            self.totals, self.parts = totals, dict(parts)
        self.refit()

    def claim_here(self, parent: tuple[int, int] | None = None) -> None:
        """A new attempt that this process owns."""
        self.claim(parent, host=socket.gethostname(), pid=os.getpid(), since=psutil.Process().create_time())

    def lease(self, ordinals: Sequence[int]) -> int:
        number = self.lease_number
        stamp = f"{self.attempt}.{self.done // self.window.every_steps}"
        write_lease(self.store, LeaseRecord(self.attempt, number, tuple(ordinals), self.clock, stamp))
        self.frontier.leased(ordinals)
        self.lease_number += 1
        return number

    def arrive(
        self,
        lease: int,
        rewards: Mapping[int, Sequence[float]],
        *,
        failed: Iterable[int] = (),
        last: bool = False,
        completion: str = "",
        **facts: Any,
    ) -> None:
        """A part with the groups of these ordinals, one reward per rollout; the `failed` ones are tombstones. `facts`
        are columns of every rollout."""
        rows = [
            self._row(o, rollout, reward, completion) | facts
            for o, values in rewards.items()
            for rollout, reward in enumerate(values)
        ]
        rows += [self._tombstone(ordinal) for ordinal in failed]
        name = self.trajectories.append(lease, schema.table(rows, schema.SHARD), last=last)
        assert name is not None
        arrived = [*rewards, *failed]
        self.frontier.buffered(arrived)
        self.parts |= dict.fromkeys(arrived, name)

    def seal(self, lease: int, ordinals: Sequence[int]) -> None:
        self.frontier.returned(self.trajectories.seal(lease, ordinals).returned)

    def decide(self, *, dropped: Mapping[int, str] | None = None, returned: Mapping[int, str] | None = None) -> None:
        """What the trainer gives up while it waits for the next step."""
        chosen = [("dropped", dropped or {}), ("returned", returned or {})]
        rows = ledger_rows(
            {**self._origin(o), "state": state, "reason": why} for state, each in chosen for o, why in each.items()
        )
        self.totals = self.totals.add(rows)
        self.ledger.write_drops(self.done + 1, rows, self.totals)
        for ordinal, reason in (dropped or {}).items():
            self.frontier.dropped([ordinal], reason)
        self.frontier.returned(returned or ())

    def step(self, ordinals: Sequence[int], *, shift: float = 0.01, **metrics: float) -> None:
        """Train these groups; the trainer's log-probs are the engine's plus `shift`."""
        step = self.done + 1
        version = self.window.training_version(step)
        rows, lags = [], {}
        for ordinal in ordinals:
            group = [
                row for row in self.trajectories.read([self.parts[ordinal]]).to_pylist() if row["ordinal"] == ordinal
            ]
            generated = sum(sum(row["loss_mask"]) for row in group)
            oldest, rewards = min(row["min_version"] for row in group), [row["reward"] for row in group]
            mean = math.fsum(rewards) / len(rewards)
            lags[version - oldest] = lags.get(version - oldest, 0) + generated
            rows.append(
                self._origin(ordinal)
                | {"state": "trained", "version_min": oldest, "version_max": max(row["max_version"] for row in group)}
                | {
                    "lag_mean": float(version - oldest),
                    "lag_max": version - oldest,
                    "reward_mean": mean,
                    "rewards": rewards,
                }
                | {"advantages": [reward - mean for reward in rewards], "tokens_generated": generated}
                | {"tokens_trained": generated, "tokens_masked": 0}
                | {
                    "trainer_logprobs": [
                        [p + shift for p, made in zip(row["logprobs"], row["loss_mask"]) if made] for row in group
                    ]
                }
            )
        table = ledger_rows(rows)
        self.totals = self.totals.add(table, lags)
        trained = float(sum(lags.values()))
        rewards = [row["reward_mean"] for row in rows]
        figures = {
            "wait_seconds": 0.5, "step_seconds": 1.0, "loss": 0.1, "grad_norm": 0.5, "entropy": 1.2, "gen_kl_error": 1e-4, "kl": 0.0,
            "reward_mean": math.fsum(rewards) / len(rewards), "completion_tokens_mean": 3.0, "completion_tokens_max": 4.0,
            "trained_tokens": trained, "masked_token_share": 0.0, "lag_mean": 0.0, "lag_max": float(max(lags)),
        }  # fmt: skip
        self.ledger.write_step(step, table, self.totals, figures | metrics)
        self.frontier.trained(ordinals, step)
        self.done = step
        if self.window.refit_due(step):
            self.refit()

    def refit(self, **seconds: float) -> None:
        record = RefitRecord(
            self.attempt,
            self.done // self.window.every_steps,
            self.done,
            ("engine-0",),
            {"pause": 0.1, "transfer": 0.4} | seconds,
            {"engine-0": 2e-6},
        )
        write_refit(self.store, record)

    def checkpoint(self) -> None:
        state = self.frontier.checkpoint()
        pinned = tuple({self.parts[ordinal] for ordinal in state.buffered})
        self.saved[self.attempt, self.done] = (self.totals, dict(self.parts))
        version = self.done // self.window.every_steps
        commit_manifest(self.store, Manifest(self.attempt, self.done, version, {}, state.to_json(), self.clock, pinned))

    def evaluate(
        self, version: int, *, sampled: Sequence[float], greedy: Sequence[float] = (), due: int | None = None
    ) -> None:
        rows = [
            {
                "version": version,
                "due_version": due,
                "dataset_index": i,
                "mode": mode,
                "reward": reward,
                "prompt": "[]",
                "completion": "4",
                "tokens": 1,
                "finish_reason": "stop",
            }
            for mode, rewards in (("sampled", sampled), ("greedy", greedy))
            for i, reward in enumerate(rewards)
        ]
        data = schema.encode(schema.table(rows, schema.EVALUATION), schema.EVALUATION, {"attempt": str(self.attempt)})
        assert self.store.put_if_absent(layout.evaluation(self.attempt, version), data)

    def _row(self, ordinal: int, rollout: int, reward: float, completion: str) -> dict[str, Any]:
        made = self.random.randint(2, 4)
        version = self.done // self.window.every_steps
        end = PROMPT_TOKENS + made
        spans = [{"attempt": self.attempt, "version": version, "start": PROMPT_TOKENS, "end": end}]
        question = f"How much is {ordinal} + {rollout}?"
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": completion or f"It is {ordinal + rollout}."},
        ]
        return self._facts(ordinal, rollout) | {
            "prompt_length": PROMPT_TOKENS,
            "token_ids": list(range(10, 10 + end)),
            "loss_mask": [False] * PROMPT_TOKENS + [True] * made,
            "logprobs": [0.0] * PROMPT_TOKENS + [-0.25 * (i + 1) for i in range(made)],
            "version_spans": spans,
            "min_version": version,
            "max_version": version,
            "engine": "engine-0",
            "reward": reward,
            "reward_components": [("correct", reward)],
            "finish_reason": "stop",
            "status": "ok",
            "seed": 7,
            "messages": json.dumps(messages),
            "turns": 1,
            "submitted_at": self.clock,
            "finished_at": self.clock + 1.5,
        }

    def _tombstone(self, ordinal: int) -> dict[str, Any]:
        empty = {name: [] for name in ("token_ids", "loss_mask", "logprobs", "version_spans")}
        outcome = {
            "engine": "",
            "finish_reason": "error",
            "status": "failed",
            "error": f"RolloutFailed: {HOSTILE}",
            "messages": "[]",
            "turns": 0,
        }
        return self._facts(ordinal, 0) | {"prompt_length": 0} | empty | outcome

    def _facts(self, ordinal: int, rollout: int) -> dict[str, Any]:
        return {
            "run_id": "synthetic", "attempt": 0, "lease": 0, "part": 0, "ordinal": ordinal, "group_id": f"synthetic-{ordinal}", "rollout": rollout,
            "sequence": 0, "epoch": 0, "dataset_index": ordinal, "environment": "sums", "tool_calls": 0, "tool_failures": 0,
        }  # fmt: skip

    def _origin(self, ordinal: int) -> dict[str, Any]:
        part: PartName = self.parts[ordinal]
        return {
            "ordinal": ordinal,
            "lease_attempt": part.attempt,
            "lease": part.lease,
            "part": part.part,
            "dataset_index": ordinal,
            "epoch": 0,
        }


def small_run(store: ObjectStore, **config: Any) -> SyntheticRun:
    """The run of the module's docstring, stopped in the middle of step 6."""
    run = SyntheticRun(store, **config)
    run.claim()
    run.evaluate(0, sampled=[0, 0, 1, 0], greedy=[0, 1])
    for ordinals in ((0, 1), (2, 3), (4, 5), (6, 7)):
        run.lease(ordinals)
    run.arrive(0, {0: [1, 0], 1: [0, 0]}, last=True)
    run.step([0, 1])
    run.arrive(1, {2: [1, 1]}, failed=[3], last=True)
    run.decide(dropped={3: f"RolloutFailed: {HOSTILE}"})
    run.arrive(2, {4: [0, 0], 5: [1, 0]}, last=True)
    run.step([2, 4])
    run.checkpoint()
    run.arrive(3, {6: [1, 1], 7: [0, 1]}, last=True)
    run.step([5, 6])  # a dead branch from here: attempt 2 resumes from step 2
    run.claim((1, 2))
    run.lease([6, 7])
    run.lease([8, 9])
    run.arrive(0, {6: [1, 0], 7: [1, 1]}, last=True, completion=HOSTILE)
    run.decide(returned={7: "stale"})
    run.step([5, 6])
    run.arrive(1, {8: [0, 1], 9: [1, 1]}, last=True)
    run.lease([7, 10])
    run.step([8, 9])
    run.checkpoint()
    run.evaluate(4, sampled=[1, 0, 1, 1], greedy=[1, 1])
    run.lease([11, 12])
    run.lease([13, 14])
    run.arrive(2, {7: [1, 1]}, failed=[10], last=True)
    run.decide(dropped={10: "RolloutFailed: engine lost"})
    run.arrive(3, {11: [1, 0]})
    run.step([7, 11])
    run.arrive(4, {13: [1, 0]})
    run.seal(4, [13, 14])
    return run
