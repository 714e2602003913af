"""The instances of a run's environment, and one rollout's use of one of them.

Invariants: at most environment.instances are in use, or one group alone that is larger; a group gets all its places or
none, so that two groups never wait for each other's; an instance that failed, or was left in the middle of a call, is closed and never used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from grpo_core.config import (
    EnvironmentConfig,
    HttpEnvironment,
    NoEnvironment,
    PythonEnvironment,
    ReasoningGymEnvironment,
    VerifiersEnvironment,
)
from grpo_core.rollout.chat import Message
from grpo_core.rollout.concurrency import call_within
from grpo_core.rollout.effort import UsageTally
from grpo_core.rollout.environments import Environment, Opening, Step
from grpo_core.rollout.http_environment import HttpClient
from grpo_core.rollout.importable import imported
from grpo_core.rollout.reasoning_gym_environment import ReasoningGym
from grpo_core.rollout.verifiers_environment import Verifiers

WAIT_SECONDS = 0.1


class EnvironmentFailed(RuntimeError):
    """An environment raised, was late, or answered what it must not; the message names the call and the cause."""


@dataclass(slots=True)
class Episode:
    """One rollout's use of an instance. Its calls raise EnvironmentFailed, and then `failed` is true; `usage` has their
    times."""

    environment: Environment
    timeout_seconds: float
    failed: bool = False
    usage: UsageTally = field(default_factory=UsageTally)

    async def reset(self, columns: Mapping[str, Any], seed: int) -> Opening:
        return await self._call("reset", Opening, columns, seed)

    async def step(self, answer: Message) -> Step:
        return await self._call("step", Step, answer)

    async def reward(self) -> float | None:
        value = await self._call("reward", int | float | None)
        if value is not None and not math.isfinite(value):
            raise self._failure(
                "reward", f"it returned {value}; return a finite number, or None where there is no reward"
            )
        return None if value is None else float(value)

    async def close(self) -> None:
        await self._call("close", object)

    async def _call(self, method: str, kind: Any, *arguments: Any) -> Any:
        began = time.monotonic()
        try:
            result = await call_within(self.timeout_seconds, getattr(self.environment, method), *arguments)
        except Exception as error:
            raise self._failure(method, f"{type(error).__name__}: {error}") from error
        except BaseException:
            # Cancelled in the middle of a call: nobody knows what state the instance is in.
            self.failed = True
            raise
        finally:
            self.usage.add(method, time.monotonic() - began)
        if not isinstance(result, kind):
            raise self._failure(method, f"it returned {result!r}; see grpo_core/rollout/environments.py")
        return result

    def _failure(self, method: str, cause: str) -> EnvironmentFailed:
        self.failed = True
        return EnvironmentFailed(f"{method} of environment {type(self.environment).__name__} failed: {cause}")


class Episodes:
    """The instances of one environment. Thread-safe; used from many event loops."""

    def __init__(self, make: Callable[[], Environment], *, instances: int, timeout_seconds: float) -> None:
        self._make = make
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._idle: list[Environment] = []
        self._instances = instances
        self._in_use = 0

    @asynccontextmanager
    async def places(self, count: int, *, deadline_seconds: float) -> AsyncIterator[None]:
        """Room for `count` episodes at once, all or none. Raise EnvironmentFailed at the deadline."""
        deadline = time.monotonic() + deadline_seconds
        while not self._take(count):
            if time.monotonic() > deadline:
                raise EnvironmentFailed(
                    f"no room for {count} rollouts became free in the environment within {deadline_seconds:g} s; raise environment.instances"
                )
            await asyncio.sleep(WAIT_SECONDS)
        try:
            yield
        finally:
            with self._lock:
                self._in_use -= count

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[Episode]:
        """An instance for one rollout, in one of the caller's places. Raise EnvironmentFailed."""
        with self._lock:
            instance = self._idle.pop() if self._idle else None
        if instance is None:
            try:
                instance = await call_within(self._timeout_seconds, self._make)
            except Exception as error:
                raise EnvironmentFailed(
                    f"an instance of the environment cannot be made: {type(error).__name__}: {error}"
                ) from error
        episode = Episode(instance, self._timeout_seconds)
        try:
            yield episode
        finally:
            if episode.failed:
                await self._discard(episode)
            else:
                with self._lock:
                    self._idle.append(instance)

    def _take(self, count: int) -> bool:
        with self._lock:
            if self._in_use and self._in_use + count > self._instances:
                return False
            self._in_use += count
            return True

    async def close(self) -> None:
        """Close the idle instances."""
        with self._lock:
            idle, self._idle = self._idle, []
        await asyncio.gather(*(self._discard(Episode(instance, self._timeout_seconds)) for instance in idle))

    async def _discard(self, episode: Episode) -> None:
        # What has failed before may fail at this too, and nobody needs it any more.
        with contextlib.suppress(EnvironmentFailed):
            await episode.close()


def open_episodes(config: EnvironmentConfig) -> Episodes | None:
    """The instances of the configured environment, None without one. Raise ValueError for one that cannot be imported."""
    if isinstance(config, NoEnvironment):
        return None
    return Episodes(_maker(config), instances=config.instances, timeout_seconds=config.timeout_seconds)


def _maker(config: EnvironmentConfig) -> Callable[[], Environment]:
    match config:
        case ReasoningGymEnvironment():
            return lambda: ReasoningGym(config.attempts, config.solved_score, config.decay, config.feedback)
        case PythonEnvironment():
            factory = imported(config.factory, "environment.factory")
            return lambda: factory(**config.arguments)
        case VerifiersEnvironment():
            # Loaded once: what differs between rollouts is in the state that each instance keeps.
            environment = imported(config.loader, "environment.loader")(**config.arguments)
            return lambda: Verifiers(environment)
        case HttpEnvironment():
            return lambda: HttpClient(config.url, attempts=config.attempts, timeout_seconds=config.timeout_seconds)
        case NoEnvironment():
            raise AssertionError("there is nothing to make")
