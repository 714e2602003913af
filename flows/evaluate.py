"""The held-out split under one version of the policy: sampled at the training temperature, and greedily beside it.

Invariant: an evaluation is stored once, under the version that was live when it began, and each of its records says
which versions its tokens are of; it uses its own seeds and never enters the ledger, so it changes nothing that is
trained. It goes beside training: PORTIONS_IN_FLIGHT of its portions are with the router, which serves all in order. It
ends within evaluation.timeout_seconds: what is not finished by then is recorded without a reward,
like what cannot be answered.
"""

import asyncio
import json
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from grpo_core.config import EvaluationConfig
from grpo_core.evaluation import Evaluation, evaluation_of
from grpo_core.prompts import Row
from grpo_core.rollout.chat import well_formed
from grpo_core.rollout.concurrency import CallsHang, on_a_loop_of_its_own, together, unless_stopped
from grpo_core.rollout.episodes import EnvironmentFailed
from grpo_core.rollout.group import Generator
from grpo_core.rollout.pool import NoEngine
from grpo_core.rollout.rewards import RewardError, Scores
from grpo_core.rollout.turns import RolloutFailed, Task
from grpo_core.trajectory import Prompt, Rollout, Stamp
from storage import layout, schema
from storage.attempts import Fence
from storage.objects import ObjectStore

Mode = Literal["sampled", "greedy"]
# Keeps the seeds of evaluations apart from those of training, whose second part is an ordinal ≥ 0.
SEED_SPACE = -1
PORTIONS_IN_FLIGHT = 32
# The finish_reason of what the deadline cut off.
LATE = "timeout"


class EvaluationStopped(RuntimeError):
    """The evaluation was told to stop; nothing of it is kept."""


class EvaluationLate(RuntimeError):
    """Nothing of an evaluation was finished by its deadline."""


@dataclass(frozen=True, slots=True)
class Portion:
    """A part of an evaluation: `count` completions of the held-out row `index`."""

    mode: Mode
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class EvaluationJob:
    """Everything the evaluation of the version `stamp`, which is live, needs. `stopped` is asked while it runs, `warn`
    hears of what a person should look at; `due` is the first due version that it serves."""

    generator: Generator
    rows: Sequence[Row]
    store: ObjectStore
    stamp: Stamp
    stopped: Callable[[], bool]
    warn: Callable[[str], None]
    due: int | None = None

    def run(self) -> Evaluation:
        """Sample, score and store. Raise EvaluationStopped when told to stop, EvaluationLate, NoEngine,
        CallsHang, or Fenced."""
        began, stopped = (
            time.monotonic(),
            EvaluationStopped(f"the evaluation of version {self.stamp.version} was stopped"),
        )
        records = on_a_loop_of_its_own(unless_stopped(self._sample(), self.stopped, stopped))
        table = schema.table(records, schema.EVALUATION)
        seconds, attempt, version = time.monotonic() - began, self.stamp.attempt, self.stamp.version
        data = schema.encode(table, schema.EVALUATION, {"attempt": str(attempt), "seconds": f"{seconds:.3f}"})
        Fence(self.store, attempt).check()
        self.store.put_if_absent(layout.evaluation(attempt, version), data)
        return evaluation_of(table, self.generator.config, attempt=attempt, version=version, seconds=seconds)

    async def _sample(self) -> list[dict[str, Any]]:
        """The records of all portions. Raise EvaluationLate, NoEngine, or CallsHang."""
        settings = self.generator.config.evaluation
        deadline = asyncio.get_running_loop().time() + settings.timeout_seconds
        late = f"not finished within evaluation.timeout_seconds={settings.timeout_seconds:g}"
        places = asyncio.Semaphore(PORTIONS_IN_FLIGHT)

        async def one(portion: Portion, session: aiohttp.ClientSession) -> list[dict[str, Any]]:
            """The records of one portion, with or without rewards. Raise NoEngine, CallsHang."""
            try:
                async with asyncio.timeout_at(deadline) as clock:
                    async with places:
                        outcomes = await self._outcomes(portion, session)
                    return await self._records(portion, outcomes)
            except (NoEngine, CallsHang):
                raise
            except Exception as error:  # noqa: BLE001 - one prompt must not cost the run its evaluation, whatever it does
                if isinstance(error, TimeoutError) and clock.expired():
                    return [self._unscored(portion, LATE, late)]
                if not isinstance(error, EnvironmentFailed | RewardError):
                    failure = "".join(traceback.format_exception(error))
                    self.warn(f"the evaluation of held-out prompt {portion.index} failed unforeseen:\n{failure}")
                return [self._unscored(portion, "error", f"{type(error).__name__}: {error}")]

        # An engine batches only what has reached it, so nothing may wait for a connection.
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            answers = await together(one(portion, session) for portion in portions(settings, len(self.rows)))
        if all(record["finish_reason"] == LATE for records in answers for record in records):
            raise EvaluationLate(
                f"the evaluation of version {self.stamp.version} was {late}, not a single completion; raise it"
            )
        return [record for records in answers for record in records]

    async def _outcomes(self, portion: Portion, session: aiohttp.ClientSession) -> list[Rollout | RolloutFailed]:
        """The completions of a portion, each or why it failed. Raise EnvironmentFailed."""
        config, stamp = self.generator.config, self.stamp
        task = Task(
            prompt=self._prompt(portion),
            session=session,
            name=f"{config.run_id}-{stamp.attempt}-evaluation-{stamp.version}-{portion.mode}-{portion.index}",
            seeds=(config.seed, SEED_SPACE, portion.index),
            temperature=config.sampling.temperature if portion.mode == "sampled" else 0.0,
            # However old they get, they are not to be trained on.
            cancellable=False,
        )
        return await self.generator.rollouts(task, portion.count)

    async def _records(self, portion: Portion, outcomes: Sequence[Rollout | RolloutFailed]) -> list[dict[str, Any]]:
        """The records of a portion's completions. Raise RewardError."""
        made = [outcome for outcome in outcomes if isinstance(outcome, Rollout)]
        failures = [
            self._unscored(portion, "error", f"{type(outcome).__name__}: {outcome}")
            for outcome in outcomes
            if isinstance(outcome, RolloutFailed)
        ]
        if not made:
            return failures
        return self._scored(portion, made, await self.generator.score(self._prompt(portion), made)) + failures

    def _prompt(self, portion: Portion) -> Prompt:
        row = self.rows[portion.index]
        return Prompt(portion.index, 0, portion.index, row.messages, row.columns)

    def _facts(self, portion: Portion) -> dict[str, Any]:
        return {
            "version": self.stamp.version,
            "due_version": self.due,
            "dataset_index": portion.index,
            "mode": portion.mode,
            "prompt": json.dumps(self.rows[portion.index].messages),
        }

    def _scored(self, portion: Portion, rollouts: Sequence[Rollout], scores: Scores) -> list[dict[str, Any]]:
        """The records of a portion's completions."""
        return [
            {
                **self._facts(portion),
                "reward": None if math.isnan(reward) else reward,
                "completion": rollout.messages[-1]["content"],
                "tokens": sum(len(turn.output_ids) for turn in rollout.turns),
                "finish_reason": rollout.finish_reason,
                **_versions(rollout, self.stamp),
            }
            for rollout, reward in zip(rollouts, scores.rewards, strict=True)
        ]

    def _unscored(self, portion: Portion, finish_reason: str, cause: str) -> dict[str, Any]:
        """The record of completions that could not be made or scored; they have no reward and enter no mean."""
        return {**self._facts(portion), "completion": well_formed(cause), "tokens": 0, "finish_reason": finish_reason}


def portions(settings: EvaluationConfig, rows: int) -> list[Portion]:
    """What an evaluation asks for: of each prompt as many completions as of any other, or one more."""
    if settings.samples_per_prompt is None:
        shares = [settings.samples // rows + (index < settings.samples % rows) for index in range(rows)]
    else:
        shares = [settings.samples_per_prompt] * min(rows, settings.samples // settings.samples_per_prompt)
    wanted = [Portion("sampled", index, share) for index, share in enumerate(shares) if share]
    return wanted + [Portion("greedy", portion.index, 1) for portion in wanted if settings.greedy]


def _versions(rollout: Rollout, stamp: Stamp) -> dict[str, Any]:
    """Which versions sampled a rollout's tokens, and how many of them did the evaluated one."""
    spans = [span for turn in rollout.turns for span in turn.spans]
    own = [span for span in spans if (span.attempt, span.version) == (stamp.attempt, stamp.version)]
    return {
        "min_version": min((span.version for span in spans), default=None),
        "max_version": max((span.version for span in spans), default=None),
        "version_tokens": sum(span.end - span.start for span in own),
    }
