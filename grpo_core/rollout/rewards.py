"""Scoring in worker processes, so that a hang, a crash or a leak in a reward function costs one group.

Contract: a reward function is named `module:function` and has TRL's signature `(completions, prompts,
completion_ids, **columns)` → one float or None per completion, plain or async. Rewards stay raw here; `None` means
unscorable and is never turned into zero. A function may be called again with the same group, when its worker was lost.

A worker scores up to rewards.groups_per_worker groups side by side, each on a thread, so that many groups that wait for
something else wait together. What one group does to the others of its worker is undone:

    it raises      an error for this group, nothing else
    it is late     an error for this group at its deadline; the worker takes no new groups, ends when the others are
                   scored, and another stands in for it at once
    it is lost     crashed, out of memory, or holding the interpreter so that the worker no longer ticks: every group it
                   had is scored once more in a worker of its own, where the one to blame fails alone, with its cause
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from grpo_core.config import RewardsConfig
from grpo_core.rollout.reward_process import (
    END_SECONDS,
    START_SECONDS,
    Components,
    RewardError,
    RewardProcess,
    WorkerLost,
    alone,
)

__all__ = ["RewardError", "RewardWorkers", "Scores", "with_source"]

# Groups that are scored once more after their worker was lost, each in a worker of its own, at the same time.
ALONE_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Scores:
    """One group scored: per source its raw values, and per rollout the weighted sum (NaN where no source could score).
    `wait_seconds` until a worker took it, `seconds` from then on."""

    components: Components
    rewards: list[float]
    wait_seconds: float = 0.0
    seconds: float = 0.0


def with_source(scores: Scores, name: str, values: Sequence[float | None], weight: float) -> Scores:
    """The scores with one more source."""
    rewards = [
        reward if value is None else weight * value if math.isnan(reward) else math.fsum((reward, weight * value))
        for reward, value in zip(scores.rewards, values, strict=True)
    ]
    return replace(scores, components={**scores.components, name: list(values)}, rewards=rewards)


class RewardWorkers:
    """A fixed number of worker processes, looked after by one event loop on a thread. Thread-safe.

    `close` ends them for good, and with them whatever is being scored.
    """

    def __init__(self, config: RewardsConfig) -> None:
        self._config = config
        self._names = [source.function for source in config.functions]
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._closing = threading.Lock()
        self._workers: list[RewardProcess] = []
        self._filling = asyncio.Lock()
        self._slots = asyncio.Semaphore(config.workers * config.groups_per_worker)
        self._alone = asyncio.Semaphore(ALONE_AT_ONCE)
        self._calls: set[asyncio.Task[Any]] = set()
        self._queued = 0
        self._scoring: set[asyncio.Task[Components]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="rewards")
        self._thread.start()
        self._run(self._fill()).result(START_SECONDS)

    def check(self) -> None:
        """Wait until every worker has imported the functions. Raise RewardError with the import's own words."""
        self._run(self._ready()).result(2 * START_SECONDS)

    def submit(
        self,
        *,
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]],
        columns: dict[str, list[Any]],
    ) -> Future[Scores]:
        """Score one group of equally long lists. The future raises RewardError on an exception, a crash, the deadline
        or after `close`; cancelling it gives the group up. Until it is its turn a group waits without a deadline, since
        whoever is before it has one."""
        call = {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids,
            "columns": columns,
        }
        return self._run(self._score(call, len(completions)))

    def score(self, **group: Any) -> Scores:
        """As `submit`, for a thread that waits."""
        return self.submit(**group).result()

    def metrics(self) -> dict[str, float]:
        """What it knows of its queue, by the names of the registry."""
        return {"scoring/queued": float(self._queued)}

    def close(self) -> None:
        """End every worker; a call that is under way ends with RewardError, and so does every later one."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            # Whatever was submitted before runs before this, and is ended by it.
            ended = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        ended.result(2 * END_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_SECONDS)
        self._loop.close()

    def __enter__(self) -> RewardWorkers:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        with self._closing:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        refused: Future[Any] = Future()
        refused.set_exception(self._refusal())
        return refused

    def _refusal(self) -> RewardError:
        return RewardError(f"reward workers of {', '.join(self._names)} are closed; nothing is scored any more")

    async def _fill(self) -> None:
        async with self._filling:
            # One that takes no more calls ends by itself, after its last.
            self._workers = [worker for worker in self._workers if worker.takes_calls]
            while self._names and len(self._workers) < self._config.workers:
                self._workers.append(await RewardProcess.start(self._config))

    async def _ready(self) -> None:
        await self._fill()
        for worker in self._workers:
            await worker.ready()

    async def _score(self, call: dict[str, Any], size: int) -> Scores:
        if not self._names:
            return Scores({}, [math.nan] * size)
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        began = time.monotonic()
        try:
            components, taken = await self._components(call)
        except asyncio.CancelledError:
            if self._closed:
                raise self._refusal() from None
            raise
        finally:
            self._calls.discard(task)
        for name, values in components.items():
            if len(values) != size:
                raise RewardError(
                    f"reward function {name} returned {len(values)} values for {size} completions; return one for each"
                )
        weights = {source.function: source.weight for source in self._config.functions}
        rewards = [_weighted(index, components, weights) for index in range(size)]
        return Scores(components, rewards, taken - began, time.monotonic() - taken)

    async def _components(self, call: dict[str, Any]) -> tuple[Components, float]:
        """The answer of a worker; of one that has nothing else to do, if the first was lost.
        And when the first took it."""
        try:
            async with self._slot():
                taken = time.monotonic()
                await self._fill()
                worker = min(self._workers, key=lambda worker: worker.load)
                # A worker cannot be told to stop. A group that is given up is scored to its end or its deadline, so
                # that one that hangs costs its worker whether somebody waits for it or not.
                scoring = asyncio.ensure_future(worker.call(call))
                self._scoring.add(scoring)
                scoring.add_done_callback(self._scored)
                return await asyncio.shield(scoring), taken
        except WorkerLost:
            async with self._alone, alone(self._config) as worker:
                try:
                    return await worker.call(call, must_tick=False), taken
                except WorkerLost as error:
                    raise RewardError(str(error)) from error

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        """A group's turn to be scored; until then it is queued."""
        self._queued += 1
        try:
            await self._slots.acquire()
        finally:
            self._queued -= 1
        try:
            yield
        finally:
            self._slots.release()

    def _scored(self, scoring: asyncio.Task[Components]) -> None:
        self._scoring.discard(scoring)
        if not scoring.cancelled():
            # Nobody may be waiting for its error any more.
            scoring.exception()

    async def _end(self) -> None:
        for task in list(self._calls):
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        await asyncio.gather(*(worker.end() for worker in self._workers))
        await asyncio.gather(*self._scoring, return_exceptions=True)


def _weighted(index: int, components: Components, weights: dict[str, float]) -> float:
    values = [(weights[name], values[index]) for name, values in components.items()]
    known = [weight * value for weight, value in values if value is not None]
    return math.fsum(known) if known else math.nan


def answer_of(completion: list[dict[str, Any]]) -> str:
    """What the policy said last; nothing when a tool or the environment had the last word, because tokens ran out."""
    last = completion[-1]
    return str(last["content"]) if last["role"] == "assistant" else ""


def reasoning_gym_score(
    completions: list[list[dict[str, str]]], entry: list[str], task: list[str], **columns: Any
) -> list[float]:
    """reasoning-gym's own scorer for the task; the answer is what the policy said last."""
    import reasoning_gym

    score = reasoning_gym.get_score_answer_fn(task[0])
    return [
        float(score(answer_of(completion).strip(), json.loads(row)))
        for completion, row in zip(completions, entry, strict=True)
    ]


def reasoning_gym_last_number(
    completions: list[list[dict[str, str]]], entry: list[str], task: list[str], **columns: Any
) -> list[float]:
    """reasoning-gym's own score of the last whole number in the answer; 0 without one. For models that talk."""
    numbers = [re.findall(r"-?\d+", answer_of(completion)) for completion in completions]
    shortened = [[{"role": "assistant", "content": found[-1] if found else ""}] for found in numbers]
    return reasoning_gym_score(shortened, entry, task)


def exact_match(completions: list[list[dict[str, str]]], answer: list[str], **columns: Any) -> list[float]:
    """1 where what the policy said last is the column `answer`, else 0."""
    return [
        float(answer_of(completion).strip() == expected.strip())
        for completion, expected in zip(completions, answer, strict=True)
    ]


def math_verify(completions: list[list[dict[str, str]]], answer: list[str], **columns: Any) -> list[float | None]:
    """1 where math-verify finds the last message equal to the column `answer`, else 0; None where that says nothing.

    Needs `pip install 'forebay[math]'`. The library's own deadlines are signals, which work in no thread but the first;
    rewards.timeout_seconds stands in for them.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    kinds = (LatexExtractionConfig(), ExprExtractionConfig())

    def score(completion: list[dict[str, str]], expected: str) -> float | None:
        gold = parse(expected if "\\" in expected or "$" in expected else f"${expected}$", kinds, parsing_timeout=None)
        if not gold:
            return None
        found = parse(answer_of(completion), kinds, parsing_timeout=None)
        return float(verify(gold, found, timeout_seconds=None))

    return [score(completion, expected) for completion, expected in zip(completions, answer, strict=True)]
