"""What a rollout is made of, as plain frozen data.

A rollout is a list of turns; `rollout.reconcile` turns it into sequences; a group is the rollouts of one
ordinal. Token offsets are half-open. Spans are the engine's own statement of which policy sampled which
token, never a client-side guess, and together they cover every generated token.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

# How a rollout ends that ran out of tokens, and one that called tools more often than it may.
LENGTH, TOOL_CALLS = "length", "tool_calls"
STAMP = re.compile(r"^(\d+)\.(\d+)$")


@dataclass(frozen=True, slots=True, order=True)
class Stamp:
    """The name of a set of policy weights: `attempt.version`, as an engine carries it."""

    attempt: int
    version: int

    def __str__(self) -> str:
        return f"{self.attempt}.{self.version}"

    @classmethod
    def parse(cls, text: str) -> Stamp:
        """Raise ValueError for anything but `attempt.version`, such as the `default` of a fresh engine."""
        match = STAMP.match(text)
        if match is None:
            raise ValueError(f"weight version {text!r} is not of the form attempt.version")
        return cls(int(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens `start` to `end` were sampled from the weights called `attempt.version`."""

    attempt: int
    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of an engine. `spans` are offsets into `output_ids`; `logprobs` has one value per output token (nats);
    `seed` is that of the request, from which the engine derives one for each of its choices."""

    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    spans: tuple[VersionSpan, ...]
    finish_reason: str
    engine: str = ""
    submitted_at: float = 0.0
    first_token_at: float | None = None
    finished_at: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Sequence:
    """One trainable row. `mask` is 1 on generated tokens; elsewhere `logprobs` is 0. `spans` are offsets into `ids`."""

    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    spans: tuple[VersionSpan, ...] = ()
    prompt_length: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """The calls of one tool, or of one method of an environment. `seconds` are those of all calls together."""

    name: str
    calls: int = 0
    failures: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Rollout:
    """A finished conversation, before reward. The first `opening_messages` messages were its prompt; `seed` is that of
    its first turn; `environment_reward` is None where no environment gave one.

    Its `tool_calls`, in `tool_rounds` rounds, are of tools of ours (`tool_usage`), of none that there is (`unknown`),
    of what could not be read (`malformed`), and else of its environment's. `tool_seconds` is what the rounds took."""

    index: int
    turns: list[Turn]
    messages: list[dict[str, Any]]
    finish_reason: str
    seed: int
    tool_calls: int = 0
    tool_failures: int = 0
    tool_seconds: float = 0.0
    opening_messages: int = 0
    environment_reward: float | None = None
    tool_rounds: int = 0
    unknown_tool_calls: int = 0
    malformed_tool_calls: int = 0
    tool_usage: tuple[Usage, ...] = ()
    environment_usage: tuple[Usage, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """One position of the prompt stream."""

    ordinal: int
    epoch: int
    dataset_index: int
    messages: list[dict[str, Any]]
    columns: dict[str, Any] = field(default_factory=dict)
