"""The instances of a run's environment, and one rollout's use of one of them.

Invariants: at most environment.instances are in use, or one group alone that is larger; what an environment returns is
checked here and nowhere else; an instance that failed, was left in the middle of a call or comes too late is closed and
never used again, and so is every instance once this is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from grpo_core.config import (
    EnvironmentConfig,
    HttpEnvironment,
    NoEnvironment,
    PythonEnvironment,
    ReasoningGymEnvironment,
    VerifiersEnvironment,
)
from grpo_core.rollout.chat import Message
from grpo_core.rollout.concurrency import CallsHang, ForeignCalls
from grpo_core.rollout.effort import UsageTally
from grpo_core.rollout.environment_output import checked_opening, checked_reward, checked_step
from grpo_core.rollout.environments import Environment, Opening, Step
from grpo_core.rollout.http_environment import HttpClient
from grpo_core.rollout.importable import imported
from grpo_core.rollout.places import NoRoom, Places
from grpo_core.rollout.reasoning_gym_environment import ReasoningGym
from grpo_core.rollout.verifiers_environment import Verifiers, load

Output = TypeVar("Output")


class EnvironmentFailed(RuntimeError):
    """An environment raised, was late, or returned what it must not;
    the message names the environment, the call and the cause."""


@dataclass(slots=True)
class Episode:
    """One rollout's use of an instance. Its calls raise EnvironmentFailed, and then `failed` is true, or CallsHang;
    `usage` has their times."""

    environment: Environment
    timeout_seconds: float
    calls: ForeignCalls = field(default_factory=lambda: ForeignCalls("the environment"))
    failed: bool = False
    usage: UsageTally = field(default_factory=UsageTally)

    async def reset(self, columns: Mapping[str, Any], seed: int) -> Opening:
        # Siblings share their columns, and history must not change with an answer;
        # environments may change what they get.
        return await self._call("reset", checked_opening, copy.deepcopy(dict(columns)), seed)

    async def step(self, answer: Message) -> Step:
        return await self._call("step", checked_step, copy.deepcopy(answer))

    async def reward(self) -> float | None:
        return await self._call("reward", checked_reward)

    async def close(self) -> None:
        await self._call("close", lambda nothing: None)

    async def _call(self, method: str, checked: Callable[[Any], Output], *arguments: Any) -> Output:
        began = time.monotonic()
        try:
            call = partial(getattr(self.environment, method), *arguments)
            return checked(await self.calls.within(self.timeout_seconds, call))
        except CallsHang:
            self.failed = True
            raise
        except Exception as error:
            self.failed = True
            kind = type(self.environment).__name__
            raise EnvironmentFailed(
                f"{method} of environment {kind} failed: {type(error).__name__}: {error}"
            ) from error
        except BaseException:
            # Cancelled in the middle of a call: nobody knows what state the instance is in.
            self.failed = True
            raise
        finally:
            self.usage.add(method, time.monotonic() - began)


class Episodes:
    """The instances of one environment. Thread-safe; used from many event loops."""

    def __init__(self, make: Callable[[], Environment], *, instances: int, timeout_seconds: float) -> None:
        self._make = make
        self._timeout_seconds = timeout_seconds
        self._calls = ForeignCalls("the environment")
        self._places = Places(instances)
        self._lock = threading.Lock()
        self._idle: list[Environment] = []
        self._instances = instances
        self._closed = False

    @asynccontextmanager
    async def places(self, count: int, *, deadline_seconds: float) -> AsyncIterator[None]:
        """Room for `count` episodes at once, all or none. Raise EnvironmentFailed at the deadline."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._places.taken(count, deadline_seconds=deadline_seconds))
            except NoRoom as error:
                raise EnvironmentFailed(
                    f"there was no room for {count} rollouts in the environment: {error}; raise environment.instances"
                ) from error
            yield

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[Episode]:
        """An instance for one rollout, in one of the caller's places. Raise EnvironmentFailed, or CallsHang."""
        with self._lock:
            instance = self._idle.pop() if self._idle else None
        episode = self._unused(await self._made() if instance is None else instance)
        try:
            yield episode
        finally:
            if episode.failed or not self._kept(episode.environment):
                await self._discard(episode)

    async def _made(self) -> Environment:
        try:
            made: Environment = await self._calls.within(
                self._timeout_seconds, self._make, unwanted=self._close_unwanted
            )
            return made
        except CallsHang:
            raise
        except Exception as error:
            raise EnvironmentFailed(
                f"an instance of the environment cannot be made: {type(error).__name__}: {error}"
            ) from error

    def _kept(self, instance: Environment) -> bool:
        """Keep an instance for later, unless there are enough."""
        with self._lock:
            if self._closed or len(self._idle) >= self._instances:
                return False
            self._idle.append(instance)
            return True

    async def close(self) -> None:
        """Close the idle instances; those in use are closed when their rollouts end."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        await asyncio.gather(*(self._discard(self._unused(instance)) for instance in idle))

    def _close_unwanted(self, instance: Environment) -> None:
        """Close an instance that was made too late, on a thread of its own."""
        asyncio.run(self._discard(self._unused(instance)))

    def _unused(self, instance: Environment) -> Episode:
        return Episode(instance, self._timeout_seconds, self._calls)

    async def _discard(self, episode: Episode) -> None:
        # What has failed before may fail at this too, and nobody needs it any more.
        with contextlib.suppress(EnvironmentFailed, CallsHang):
            await episode.close()


def open_episodes(config: EnvironmentConfig) -> Episodes | None:
    """The instances of the configured environment, None without one.
    Raise ValueError for one that cannot be imported or loaded."""
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
            shared = load(imported(config.loader, "environment.loader"), config.arguments)
            return lambda: Verifiers(shared)
        case HttpEnvironment():
            return lambda: HttpClient(config.url, attempts=config.attempts, timeout_seconds=config.timeout_seconds)
        case NoEnvironment():
            raise AssertionError("there is nothing to make")
