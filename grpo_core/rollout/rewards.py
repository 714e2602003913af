"""Scoring in worker processes, so that a hang, a crash or a leak in a reward function costs one group.

Contract: a reward function is named `module:function` and has TRL's signature `(completions, prompts,
completion_ids, **columns)` → one float or None per completion, plain or async. A worker is a child process that
speaks one JSON line per call over its pipes; it ends when this process ends, because its standard input closes.
Rewards stay raw here; `None` means unscorable and is never turned into zero.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_core.config import RewardsConfig

START_SECONDS = 120.0
# A worker is gone within moments of being killed.
END_SECONDS = 10.0


class RewardError(RuntimeError):
    """A group that could not be scored; the message names the function and the cause."""


@dataclass(frozen=True, slots=True)
class Scores:
    """One group scored: per source its raw values, and per rollout the weighted sum (NaN where no source could score)."""

    components: dict[str, list[float | None]]
    rewards: list[float]


class RewardWorkers:
    """A fixed set of worker processes. Thread-safe; `close` ends them for good."""

    def __init__(self, config: RewardsConfig) -> None:
        self._config = config
        self._names = [source.function for source in config.functions]
        self._idle: queue.Queue[_Worker] = queue.Queue()
        self._workers = [_Worker(self._names) for _ in range(config.workers)]
        for worker in self._workers:
            self._idle.put(worker)

    def check(self) -> None:
        """Wait until every worker has imported the functions. Raise RewardError with the import's own words."""
        for worker in self._workers:
            worker.ready(START_SECONDS)

    def score(
        self,
        *,
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]],
        columns: dict[str, list[Any]],
    ) -> Scores:
        """Score one group of equally long lists. Raise RewardError on an exception, a crash, the deadline or after `close`."""
        try:
            worker = self._idle.get(timeout=self._config.timeout_seconds * (1 + len(self._workers)))
        except queue.Empty as error:
            raise RewardError(
                f"no reward worker became free within rewards.timeout_seconds={self._config.timeout_seconds:g}; add rewards.workers"
            ) from error
        try:
            call = {
                "prompts": prompts,
                "completions": completions,
                "completion_ids": completion_ids,
                "columns": columns,
            }
            components = worker.call(call, self._config.timeout_seconds)
        finally:
            self._idle.put(worker)
        for name, values in components.items():
            if len(values) != len(completions):
                raise RewardError(
                    f"reward function {name} returned {len(values)} values for {len(completions)} completions; return one for each"
                )
        weights = {source.function: source.weight for source in self._config.functions}
        return Scores(components, [_weighted(index, components, weights) for index in range(len(completions))])

    def close(self) -> None:
        """End every worker; a call that is under way ends with RewardError, and so does every later one."""
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> RewardWorkers:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _weighted(index: int, components: dict[str, list[float | None]], weights: dict[str, float]) -> float:
    values = [(weights[name], values[index]) for name, values in components.items()]
    known = [weight * value for weight, value in values if value is not None]
    return math.fsum(known) if known else math.nan


class _Worker:
    """One child process, started again after it had to be killed. One thread calls at a time; any may close."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._lock = threading.Lock()
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        arguments = [sys.executable, "-m", "grpo_core.rollout.reward_worker", *self._names]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        with self._lock:
            if self._closed:
                raise RewardError(f"reward workers of {', '.join(self._names)} are closed; nothing is scored any more")
            # A session of its own: a Ctrl-C in the terminal is for the flow, which then closes us.
            self._process = subprocess.Popen(
                arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
            )
            self._pending = b""
            self._greeted = False
            return self._process

    def ready(self, seconds: float) -> subprocess.Popen[bytes]:
        """The process, started if need be, once it has imported the functions. Raise RewardError."""
        process = self._process if self._process is not None and not self._closed else self._start()
        if not self._greeted:
            hello = self._line(process, seconds, "importing the reward functions")
            if "error" in hello:
                self._drop(process)
                raise RewardError(hello["error"])
            self._greeted = True
        return process

    def call(self, call: dict[str, Any], seconds: float) -> dict[str, list[float | None]]:
        process = self.ready(START_SECONDS)
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(call, default=str).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError as error:
            self._drop(process)
            raise RewardError(
                f"reward worker of {', '.join(self._names)} was gone before it could score this group; see its last lines above"
            ) from error
        answer = self._line(process, seconds, "scoring")
        if "error" in answer:
            raise RewardError(answer["error"])
        return answer["rewards"]

    def _line(self, process: subprocess.Popen[bytes], seconds: float, doing: str) -> dict[str, Any]:
        assert process.stdout is not None
        descriptor, deadline = process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self._pending:
            readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                self._drop(process)
                raise RewardError(
                    f"reward worker did not finish {doing} ({', '.join(self._names)}) within {seconds:g} s; raise rewards.timeout_seconds"
                )
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                status = process.wait(END_SECONDS)
                self._drop(process)
                raise RewardError(
                    f"reward worker died with status {status} while {doing} ({', '.join(self._names)}); see its last lines above"
                )
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _drop(self, process: subprocess.Popen[bytes]) -> None:
        """End the process and let the next call start another; for the thread that calls."""
        process.kill()
        process.wait(END_SECONDS)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                # Unsent bytes to a worker that is gone by our own hand.
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._process = None

    def close(self) -> None:
        """End the process for good. Its pipes are left to a thread that may be reading them, which finds their end."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()
                self._process.wait(END_SECONDS)


def reasoning_gym_score(
    completions: list[list[dict[str, str]]], entry: list[str], task: list[str], **columns: Any
) -> list[float]:
    """reasoning-gym's own scorer for the task; the answer is the text of the last message."""
    import reasoning_gym

    score = reasoning_gym.get_score_answer_fn(task[0])
    return [
        float(score(completion[-1]["content"].strip(), json.loads(row)))
        for completion, row in zip(completions, entry, strict=True)
    ]


def reasoning_gym_last_number(
    completions: list[list[dict[str, str]]], entry: list[str], task: list[str], **columns: Any
) -> list[float]:
    """reasoning-gym's own score of the last whole number in the answer; 0 without one. For models that talk."""
    numbers = [re.findall(r"-?\d+", completion[-1]["content"]) for completion in completions]
    shortened = [[{"role": "assistant", "content": found[-1] if found else ""}] for found in numbers]
    return reasoning_gym_score(shortened, entry, task)


def exact_match(completions: list[list[dict[str, str]]], answer: list[str], **columns: Any) -> list[float]:
    """1 where the text of the last message is the column `answer`, else 0."""
    return [
        float(completion[-1]["content"].strip() == expected.strip())
        for completion, expected in zip(completions, answer, strict=True)
    ]
