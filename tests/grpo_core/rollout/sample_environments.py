"""Environments that behave and misbehave."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from typing import Any

from grpo_core.rollout.environments import Opening, Step

SCHEMA = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}


class Counting:
    """Says how often it was answered, and is done after `steps`. Does what the column `word` says to the rollouts whose
    number `hits` is: instances are numbered as they are made."""

    made: list[Counting] = []

    def __init__(self, steps: int = 2, hits: tuple[int, ...] = ()) -> None:
        self.number = len(Counting.made)
        Counting.made.append(self)
        self.steps, self.hits = steps, tuple(hits)
        self.resets: list[tuple[dict[str, Any], int]] = []
        self.answers: list[dict[str, Any]] = []
        self.closed = False

    def reset(self, columns: Mapping[str, Any], seed: int) -> Opening:
        assert not self.closed
        self.resets.append((dict(columns), seed))
        self.answers = []
        if self._nonsense("reset", columns):
            return Opening(({"role": "user"},))
        self._misbehave("reset", columns)
        self.word = str(columns.get("word", ""))
        text = f"task {self.number}" if self.word == "different" else f"task {seed % 10}"
        return Opening(({"role": "user", "content": text},), (SCHEMA,) if self.word == "tools" else ())

    async def step(self, answer: dict[str, Any]) -> Step:
        self.answers.append(answer)
        if self.resets[-1][0].get("word") == "step hang" and self.number in self.hits:
            await asyncio.sleep(20)
        self._misbehave("step", self.resets[-1][0])
        if self._nonsense("step", self.resets[-1][0]):
            return Step(({"role": "user", "content": 3},))
        if len(self.answers) == self.steps:
            return Step(done=True)
        role = "tool" if answer.get("tool_calls") else "user"
        return Step(({"role": role, "content": f"answer {len(self.answers)}"},))

    def reward(self) -> float | None:
        self._misbehave("reward", self.resets[-1][0])
        if self._nonsense("reward", self.resets[-1][0]):
            return math.nan
        if self.word == "infinite":
            return math.inf
        return None if self.word == "unknown" else float(len(self.answers))

    def close(self) -> None:
        self.closed = True

    def _nonsense(self, method: str, columns: Mapping[str, Any]) -> bool:
        return self.number in self.hits and columns.get("word") == f"{method} nonsense"

    def _misbehave(self, method: str, columns: Mapping[str, Any]) -> None:
        if self.number not in self.hits:
            return
        match str(columns.get("word", "")).split():
            case [asked, "raise"] if asked == method:
                raise KeyError("lost")
            case [asked, "hang"] if asked == method:
                time.sleep(20)


class Unspeakable(Counting):
    """Fails with a cause that no file takes."""

    def reset(self, columns: Mapping[str, Any], seed: int) -> Opening:
        raise OSError("no \ud83d")


def broken() -> Counting:
    raise OSError("no machine")
