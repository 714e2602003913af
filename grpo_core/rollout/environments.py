"""Environments: what answers the policy between its turns. This is all that one has to offer.

An instance is used for one rollout at a time: `reset`, then `step` after each answer that is not made of calls of
generation.tools alone, then `reward` once, whatever ended the rollout. The last answer is seen too when it was cut off,
or calls tools once more than generation.max_tool_calling_iterations; what `step` says to it is not heard. Methods may
be plain or async; each call has the deadline environment.timeout_seconds. An instance is made once and reset often, and
may be reset on another thread or event loop than before, never on two at once. All siblings of a prompt are reset with
the same columns and seed, so that they are given the same task.

A call that raises, is late or returns what `environment_output` refuses fails its rollout, which is tried again in
another instance; the failed one is closed, be it while its late call still runs, and never used again.
It is never a reward of zero.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from grpo_core.rollout.chat import Message


@dataclass(frozen=True, slots=True)
class Opening:
    """What a reset says. `messages` follow the prompt of the dataset; a first one of the same role as the prompt's last
    joins it. `tools` are JSON schemas of tools that the environment itself answers, in `step`."""

    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment says to an answer. When `done`, or without a message, the rollout is over."""

    messages: tuple[Message, ...] = ()
    done: bool = False


class Environment(Protocol):
    """What an instance offers; every method may also be a coroutine function."""

    def reset(self, columns: Mapping[str, Any], seed: int) -> Opening | Awaitable[Opening]:
        """Begin an episode about one row of the dataset: its columns, and its messages as `prompt`.

        The same arguments must give the same task. 0 ≤ seed < 2³¹.
        """

    def step(self, answer: Message) -> Step | Awaitable[Step]:
        """Answer one assistant message: `content`, and `tool_calls` for calls of the environment's own tools,
        where they are to be made."""

    def reward(self) -> float | Awaitable[float | None] | None:
        """The reward of the whole episode; None where it cannot be told."""

    def close(self) -> Awaitable[None] | None:
        """Give up what the instance holds; it is not used again."""
