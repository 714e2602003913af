"""The held-out split under one version of the policy: sampled at the training temperature, and greedily beside it.

Invariant: an evaluation is stored once, under the version its tokens were sampled with; it uses its own seeds and
never enters the ledger, so it changes nothing that is trained.
"""

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from grpo_core.prompts import Row
from grpo_core.rollout.episodes import EnvironmentFailed
from grpo_core.rollout.group import Generator, RolloutFailed, Task
from grpo_core.rollout.rewards import RewardError, Scores
from grpo_core.trajectory import Prompt, Rollout
from storage import layout, schema
from storage.objects import ObjectStore

Mode = Literal["sampled", "greedy"]
# Keeps the seeds of evaluations apart from those of training, whose second part is an ordinal ≥ 0.
SEED_SPACE = -1
REQUESTS_IN_FLIGHT = 32


@dataclass(frozen=True, slots=True)
class Request:
    """`count` completions of the held-out row `index`."""

    mode: Mode
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class Score:
    """Mean reward of one mode over `samples` completions; `error` is the standard error of the mean."""

    mean: float
    error: float
    samples: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What one version scored on the held-out split."""

    version: int
    scores: dict[Mode, Score]

    def line(self) -> str:
        parts = [
            f"{mode} {score.mean:.3f} ± {1.96 * score.error:.3f} ({score.samples})"
            for mode, score in self.scores.items()
        ]
        return f"held-out reward of version {self.version}: " + ", ".join(parts)

    def metrics(self) -> dict[str, float]:
        """Means and their standard errors, by the names of the registry."""
        means = {f"evaluation/{mode}": score.mean for mode, score in self.scores.items()}
        return means | {f"evaluation_error/{mode}": score.error for mode, score in self.scores.items()}


def evaluate(
    generator: Generator, rows: Sequence[Row], store: ObjectStore, *, attempt: int, version: int
) -> Evaluation:
    """Sample, score and store."""
    settings = generator.config.evaluation
    shares = [settings.samples // len(rows) + (index < settings.samples % len(rows)) for index in range(len(rows))]
    wanted = [Request("sampled", index, share) for index, share in enumerate(shares) if share]
    if settings.greedy:
        wanted += [Request("greedy", request.index, 1) for request in wanted]
    records = asyncio.run(_sample(generator, rows, wanted, version))
    table = schema.table(records, schema.EVALUATION)
    store.put_if_absent(
        layout.evaluation(attempt, version), schema.encode(table, schema.EVALUATION, {"attempt": str(attempt)})
    )
    return Evaluation(version, _scores(records))


async def _sample(
    generator: Generator, rows: Sequence[Row], wanted: Sequence[Request], version: int
) -> list[dict[str, Any]]:
    places = asyncio.Semaphore(REQUESTS_IN_FLIGHT)

    async def one(request: Request, session: aiohttp.ClientSession) -> list[dict[str, Any]]:
        try:
            return await scored(request, session)
        except (EnvironmentFailed, RolloutFailed, RewardError) as error:
            # One prompt that cannot be answered or scored must not cost the run its evaluation.
            return [_unscored(rows[request.index], request, version, f"{type(error).__name__}: {error}")]

    async def scored(request: Request, session: aiohttp.ClientSession) -> list[dict[str, Any]]:
        """The records of one request; at most REQUESTS_IN_FLIGHT of them are with the engines at a time."""
        config, row = generator.config, rows[request.index]
        task = Task(
            prompt=Prompt(request.index, 0, request.index, row.messages, row.columns),
            session=session,
            name=f"{config.run_id}-evaluation-{version}-{request.mode}-{request.index}",
            seeds=(config.seed, SEED_SPACE, request.index),
            temperature=config.sampling.temperature if request.mode == "sampled" else 0.0,
        )
        async with places:
            outcomes = await generator.rollouts(task, request.count)
        if failure := next((outcome for outcome in outcomes if isinstance(outcome, RolloutFailed)), None):
            raise failure
        rollouts = [outcome for outcome in outcomes if isinstance(outcome, Rollout)]
        return _records(row, request, rollouts, await generator.score(task.prompt, rollouts), version)

    async with aiohttp.ClientSession() as session:
        answers = await asyncio.gather(*(one(request, session) for request in wanted))
    return [record for records in answers for record in records]


def _records(
    row: Row, request: Request, rollouts: Sequence[Rollout], scores: Scores, version: int
) -> list[dict[str, Any]]:
    return [
        {
            "version": version,
            "dataset_index": request.index,
            "mode": request.mode,
            "reward": None if math.isnan(reward) else reward,
            "prompt": json.dumps(row.messages),
            "completion": rollout.messages[-1]["content"],
            "tokens": sum(len(turn.output_ids) for turn in rollout.turns),
            "finish_reason": rollout.finish_reason,
        }
        for rollout, reward in zip(rollouts, scores.rewards, strict=True)
    ]


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


def _scores(records: Sequence[dict[str, Any]]) -> dict[Mode, Score]:
    modes: tuple[Mode, ...] = ("sampled", "greedy")
    return {mode: score for mode in modes if (score := _score(records, mode)) is not None}


def _score(records: Sequence[dict[str, Any]], mode: str) -> Score | None:
    values = [record["reward"] for record in records if record["mode"] == mode and record["reward"] is not None]
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
    return Score(mean, math.sqrt(variance / len(values)), len(values))


def read_evaluations(store: ObjectStore) -> list[Evaluation]:
    """Every stored evaluation, by version."""
    found = {}
    for key in sorted(store.list(layout.evaluations_prefix(), recursive=True)):
        name = layout.parse_evaluation(key)
        if name is None:
            continue
        table, _ = schema.decode(store.get(key), ["mode", "reward"], name=key)
        records = table.to_pylist()
        found[name.version] = Evaluation(name.version, _scores(records))
    return [found[version] for version in sorted(found)]
