"""From a prompt's token ids to turns: one request, made again on other engines within its budget.

Invariants: every request has a deadline, a seed and an id of its own; an answer that cannot be believed costs itself,
not the others of its request. That no engine is to be had is not the prompt's fault: NoEngine goes to the caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from grpo_core.config import RunConfig
from grpo_core.rollout.chat import Chat
from grpo_core.rollout.effort import Effort
from grpo_core.rollout.engine import EngineClient, EngineRejected, EngineUnavailable
from grpo_core.rollout.pool import Member, Pool
from grpo_core.rollout.wire import ABORTED, OLD_SALT, InvalidGeneration
from grpo_core.trajectory import Prompt, Stamp, Turn


class RolloutFailed(RuntimeError):
    """A rollout that failed more often than its budget allows; the message names the last cause."""


class TurnAborted(RuntimeError):
    """A later turn of a rollout was cut off from outside: its earlier turns are too old to be trained on."""


class TurnDiscarded(RuntimeError):
    """One of several answers of `engine` cannot be believed; it was asked for `spent` times."""

    def __init__(self, cause: InvalidGeneration, engine: str, spent: int) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.engine = engine
        self.spent = spent


@dataclass(frozen=True, slots=True)
class Task:
    """What the rollouts of one prompt have in common. `name` begins the ids of their requests; `seeds` are what all
    their seeds are derived from; `cancellable` says whether a request may be cut off when it is too old to be trained
    on. `effort` counts what they cost."""

    prompt: Prompt
    session: aiohttp.ClientSession
    name: str
    seeds: tuple[int, ...]
    temperature: float
    cancellable: bool = True
    effort: Effort = field(default_factory=Effort)


@dataclass(frozen=True, slots=True)
class Request:
    """`count` continuations of one prompt, of at most `max_tokens` each, by one request: the prompt is read once, and
    the server's own work per rollout falls fourfold. `prefixes` as in `Pool.engine`. `since` is the version under which
    a rollout began that has earlier turns."""

    name: str
    ids: Sequence[int]
    count: int
    seed: int
    max_tokens: int
    prefixes: Sequence[str]
    since: Stamp | None = None


@dataclass(frozen=True, slots=True)
class Turns:
    """Asks the pool's engines, as one run does."""

    config: RunConfig
    chat: Chat
    pool: Pool

    async def ask(
        self, task: Task, request: Request, discarded: TurnDiscarded | None = None
    ) -> Sequence[Turn | TurnDiscarded]:
        """The answers to a request, tried on other engines within the budget, of which `discarded` has spent a part.
        Raise RolloutFailed when none could be had, NoEngine, or TurnAborted when a later turn of a rollout was cut off
        from outside because of those before it."""
        attempts = self.config.generation.max_rollout_attempts
        cause: Exception | None = discarded
        spent = 0 if discarded is None else discarded.spent
        avoid = {discarded.engine} if discarded is not None and blames_engine(discarded.cause) else set[str]()
        for tried in range(spent + 1, attempts + 1):
            try:
                return await self._once(task, request, tried, avoid)
            except EngineRejected as error:
                task.effort.failed_requests += 1
                raise RolloutFailed(str(error)) from error
            except (EngineUnavailable, InvalidGeneration) as error:
                cause = error
                task.effort.aborted_requests += is_aborted(error)
                task.effort.failed_requests += not is_aborted(error)
                if is_aborted(error):
                    if request.since is not None and self.config.grpo.async_grpo.stale_policy != "mask":
                        raise TurnAborted(str(error)) from error
                elif blames_engine(error) and tried < attempts:
                    # An engine that just died is ejected within a second;
                    # asking it again at once would spend the budget.
                    await asyncio.sleep(min(8.0, 0.5 * 2**tried))
        raise RolloutFailed(f"{attempts} attempts failed, the last with: {cause}") from cause

    async def _once(self, task: Task, request: Request, tried: int, avoid: set[str]) -> Sequence[Turn | TurnDiscarded]:
        """Try number `tried` of a request. An engine that had better not be asked again is added to `avoid`."""
        config, name = self.config, f"{request.name}-{tried}"
        async with self.pool.engine(
            weight=request.count,
            deadline_seconds=config.pool.start_timeout_seconds,
            prefixes=request.prefixes,
            avoid=avoid,
            request_id=name if task.cancellable else None,
            since=request.since,
        ) as member:
            try:
                turns = await self._client(member, task.session).generate_many(
                    request.ids,
                    request.count,
                    request_id=name,
                    sampling=config.sampling.model_copy(update={"temperature": task.temperature}),
                    max_tokens=request.max_tokens,
                    seed=request.seed,
                    stop_token_ids=self.chat.stop_token_ids,
                    cache_salt=str(self.pool.stamp),
                    deadline_seconds=config.generation.request_timeout_seconds,
                )
                believed = sorted_out(turns, member.name, tried)
            except (EngineUnavailable, InvalidGeneration) as error:
                if blames_engine(error) or is_aborted(error):
                    # What was cut off may have been so by a refit that failed on this engine.
                    avoid.add(member.name)
                if blames_engine(error):
                    self.pool.failed(member.name)
                raise
            discarded = [turn for turn in believed if isinstance(turn, TurnDiscarded)]
            # Each of them is made again by a request of its own.
            task.effort.failed_requests += len(discarded)
            if any(blames_engine(turn.cause) for turn in discarded):
                self.pool.failed(member.name)
            return believed

    def _client(self, member: Member, session: aiohttp.ClientSession) -> EngineClient:
        """How this run speaks to an engine."""
        return EngineClient(
            member.url,
            session=session,
            name=member.name,
            kept_caches=not self.config.grpo.async_grpo.recompute_kv_cache_after_weight_updates,
            adapters=self.config.refit.adapter_only,
        )


def sorted_out(turns: Sequence[Turn | InvalidGeneration], engine: str, spent: int) -> Sequence[Turn | TurnDiscarded]:
    """The answers of one request. Raise InvalidGeneration when no turn can be believed, and when the request was cut
    off: its whole turns are then as old as the others."""
    invalid = [turn for turn in turns if isinstance(turn, InvalidGeneration)]
    for cause in invalid:
        if len(invalid) == len(turns) or is_aborted(cause):
            raise cause
    return [turn if isinstance(turn, Turn) else TurnDiscarded(turn, engine, spent) for turn in turns]


def is_aborted(error: Exception) -> bool:
    """Whether a turn was cut off: we ended it ourselves, or somebody ended all requests of its engine."""
    return isinstance(error, InvalidGeneration) and error.reason == ABORTED


def blames_engine(error: Exception) -> bool:
    """Whether something is wrong with the engine; nothing is when a turn was cut off, or a refit came between."""
    return not (isinstance(error, InvalidGeneration) and error.reason in (ABORTED, OLD_SALT))
