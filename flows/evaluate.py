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
from grpo_core.rollout.group import Generator, derived_seed
from grpo_core.trajectory import Turn
from storage import layout, schema
from storage.objects import ObjectStore

Mode = Literal["sampled", "greedy"]
# Keeps the seeds of evaluations apart from those of training, whose second part is an ordinal ≥ 0.
SEED_SPACE = -1


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
        parts = [f"{mode} {score.mean:.3f} ± {1.96 * score.error:.3f} ({score.samples})" for mode, score in self.scores.items()]
        return f"held-out reward of version {self.version}: " + ", ".join(parts)


def evaluate(generator: Generator, rows: Sequence[Row], store: ObjectStore, *, attempt: int, version: int) -> Evaluation:
    """Sample, score and store. Raise RolloutFailed or RewardError."""
    settings = generator.config.evaluation
    wanted: list[tuple[Mode, int]] = [("sampled", number) for number in range(settings.samples)]
    if settings.greedy:
        wanted += [("greedy", number) for number in range(min(len(rows), settings.samples))]
    records = asyncio.run(_sample(generator, rows, wanted, version))
    table = schema.table(records, schema.EVALUATION)
    store.put_if_absent(layout.evaluation(attempt, version), schema.encode(table, schema.EVALUATION, {"attempt": str(attempt)}))
    return Evaluation(version, {mode: score for mode in ("sampled", "greedy") if (score := _score(records, mode))})


async def _sample(generator: Generator, rows: Sequence[Row], wanted: Sequence[tuple[Mode, int]], version: int) -> list[dict[str, Any]]:
    connector = aiohttp.TCPConnector(limit=len(wanted) + 1)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def one(mode: Mode, number: int) -> Turn:
            row = rows[number % len(rows)]
            return await generator.turn(
                generator.chat.render(row.messages),
                session,
                request_id=f"{generator.config.run_id}-evaluation-{version}-{mode}-{number}",
                seed=derived_seed(generator.config.seed, SEED_SPACE, number),
                temperature=generator.config.sampling.temperature if mode == "sampled" else 0.0,
            )

        turns = await asyncio.gather(*(one(mode, number) for mode, number in wanted))
    rewards = await asyncio.to_thread(_rewards, generator, rows, wanted, turns)
    return [
        {
            "version": version,
            "dataset_index": number % len(rows),
            "mode": mode,
            "reward": None if math.isnan(reward) else reward,
            "prompt": json.dumps(rows[number % len(rows)].messages),
            "completion": generator.chat.text(turn.output_ids),
            "tokens": len(turn.output_ids),
            "finish_reason": turn.finish_reason,
        }
        for (mode, number), turn, reward in zip(wanted, turns, rewards, strict=True)
    ]


def _rewards(generator: Generator, rows: Sequence[Row], wanted: Sequence[tuple[Mode, int]], turns: Sequence[Turn]) -> list[float]:
    """Score in batches of one group's size, the size reward functions are made for."""
    rewards: list[float] = []
    size = generator.config.grpo.num_generations_per_prompt
    for first in range(0, len(turns), size):
        batch = turns[first : first + size]
        chosen = [rows[number % len(rows)] for _, number in wanted[first : first + size]]
        scores = generator.rewards.score(
            prompts=[row.messages for row in chosen],
            completions=[[{"role": "assistant", "content": generator.chat.text(turn.output_ids)}] for turn in batch],
            completion_ids=[turn.output_ids for turn in batch],
            columns={name: [row.columns[name] for row in chosen] for name in chosen[0].columns},
        )
        rewards += scores.rewards
    return rewards


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
        found[name.version] = Evaluation(name.version, {mode: score for mode in ("sampled", "greedy") if (score := _score(records, mode))})
    return [found[version] for version in sorted(found)]
