"""The held-out split under one version of the policy: sampled at the training temperature, and greedily beside it.

Invariant: an evaluation is stored once, under the version that was live when it began, and each of its records says
which versions its tokens are of; it uses its own seeds and never enters the ledger, so it changes nothing that is
trained. It goes beside training: REQUESTS_IN_FLIGHT of its requests are with the router, which serves all in order.
"""

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from grpo_core.config import EvaluationConfig
from grpo_core.evaluation import Evaluation, evaluation_of
from grpo_core.prompts import Row
from grpo_core.rollout.concurrency import together
from grpo_core.rollout.episodes import EnvironmentFailed
from grpo_core.rollout.group import Generator, RolloutFailed, Task
from grpo_core.rollout.rewards import RewardError, Scores
from grpo_core.trajectory import Prompt, Rollout, Stamp
from storage import layout, schema
from storage.attempts import Fence
from storage.objects import ObjectStore

Mode = Literal["sampled", "greedy"]
# Keeps the seeds of evaluations apart from those of training, whose second part is an ordinal ≥ 0.
SEED_SPACE = -1
REQUESTS_IN_FLIGHT = 32


class EvaluationStopped(RuntimeError):
    """The evaluation was told to stop; nothing of it is kept."""


@dataclass(frozen=True, slots=True)
class Request:
    """`count` completions of the held-out row `index`."""

    mode: Mode
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class EvaluationJob:
    """Everything the evaluation of the version `stamp`, which is live, needs. `stopped` is asked while it runs."""

    generator: Generator
    rows: Sequence[Row]
    store: ObjectStore
    stamp: Stamp
    stopped: Callable[[], bool]

    def run(self) -> Evaluation:
        """Sample, score and store. Raise EvaluationStopped when told to stop, NoEngine, or Fenced."""
        began = time.monotonic()
        table = schema.table(asyncio.run(self._until_stopped()), schema.EVALUATION)
        seconds, attempt, version = time.monotonic() - began, self.stamp.attempt, self.stamp.version
        data = schema.encode(table, schema.EVALUATION, {"attempt": str(attempt), "seconds": f"{seconds:.3f}"})
        Fence(self.store, attempt).check()
        self.store.put_if_absent(layout.evaluation(attempt, version), data)
        return evaluation_of(table, self.generator.config, attempt=attempt, version=version, seconds=seconds)

    async def _until_stopped(self) -> list[dict[str, Any]]:
        work = asyncio.create_task(_sample(self.generator, self.rows, self.stamp))
        while not work.done():
            await asyncio.wait({work}, timeout=0.2)
            if self.stopped() and not work.done():
                work.cancel()
                await asyncio.wait({work}, timeout=5)
                raise EvaluationStopped(f"the evaluation of version {self.stamp.version} was stopped")
        return work.result()


def requests(settings: EvaluationConfig, rows: int) -> list[Request]:
    """What an evaluation asks for: of each prompt as many completions as of any other, or one more."""
    if settings.samples_per_prompt is None:
        shares = [settings.samples // rows + (index < settings.samples % rows) for index in range(rows)]
    else:
        shares = [settings.samples_per_prompt] * min(rows, settings.samples // settings.samples_per_prompt)
    wanted = [Request("sampled", index, share) for index, share in enumerate(shares) if share]
    return wanted + [Request("greedy", request.index, 1) for request in wanted if settings.greedy]


async def _sample(generator: Generator, rows: Sequence[Row], stamp: Stamp) -> list[dict[str, Any]]:
    """The records of all requests."""
    places = asyncio.Semaphore(REQUESTS_IN_FLIGHT)

    async def one(request: Request, session: aiohttp.ClientSession) -> list[dict[str, Any]]:
        try:
            return await scored(request, session)
        except (EnvironmentFailed, RolloutFailed, RewardError) as error:
            # One prompt that cannot be answered or scored must not cost the run its evaluation.
            return [_unscored(rows[request.index], request, stamp.version, f"{type(error).__name__}: {error}")]

    async def scored(request: Request, session: aiohttp.ClientSession) -> list[dict[str, Any]]:
        """The records of one request; at most REQUESTS_IN_FLIGHT of them are with the engines at a time."""
        config, row = generator.config, rows[request.index]
        task = Task(
            prompt=Prompt(request.index, 0, request.index, row.messages, row.columns),
            session=session,
            name=f"{config.run_id}-{stamp.attempt}-evaluation-{stamp.version}-{request.mode}-{request.index}",
            seeds=(config.seed, SEED_SPACE, request.index),
            temperature=config.sampling.temperature if request.mode == "sampled" else 0.0,
            # However old they get, they are not to be trained on.
            cancellable=False,
        )
        async with places:
            outcomes = await generator.rollouts(task, request.count)
        if failure := next((outcome for outcome in outcomes if isinstance(outcome, RolloutFailed)), None):
            raise failure
        rollouts = [outcome for outcome in outcomes if isinstance(outcome, Rollout)]
        return _records(row, request, rollouts, await generator.score(task.prompt, rollouts), stamp)

    # An engine batches only what has reached it, so nothing may wait for a connection.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        answers = await together(one(request, session) for request in requests(generator.config.evaluation, len(rows)))
    return [record for records in answers for record in records]


def _records(
    row: Row, request: Request, rollouts: Sequence[Rollout], scores: Scores, stamp: Stamp
) -> list[dict[str, Any]]:
    return [
        {
            "version": stamp.version,
            "dataset_index": request.index,
            "mode": request.mode,
            "reward": None if math.isnan(reward) else reward,
            "prompt": json.dumps(row.messages),
            "completion": rollout.messages[-1]["content"],
            "tokens": sum(len(turn.output_ids) for turn in rollout.turns),
            "finish_reason": rollout.finish_reason,
            **_versions(rollout, stamp),
        }
        for rollout, reward in zip(rollouts, scores.rewards, strict=True)
    ]


def _versions(rollout: Rollout, stamp: Stamp) -> dict[str, Any]:
    """Which versions sampled a rollout's tokens, and how many of them did the evaluated one."""
    spans = [span for turn in rollout.turns for span in turn.spans]
    own = [span for span in spans if (span.attempt, span.version) == (stamp.attempt, stamp.version)]
    return {
        "min_version": min((span.version for span in spans), default=None),
        "max_version": max((span.version for span in spans), default=None),
        "version_tokens": sum(span.end - span.start for span in own),
    }


def _unscored(row: Row, request: Request, version: int, error: str) -> dict[str, Any]:
    """The record of held-out completions that could not be made or scored; they have no reward and enter no mean."""
    return {
        "version": version,
        "dataset_index": request.index,
        "mode": request.mode,
        "prompt": json.dumps(row.messages),
        "completion": error,
        "tokens": 0,
        "finish_reason": "error",
    }
