"""reasoning-gym's tasks as an environment: its own scorer answers, and an answer that is not solved may be tried again.

The question is already in the prompt of the dataset, so a reset says nothing. The reward is the best score of the
attempts, each after the first worth `decay` times less than the one before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from grpo_core.rollout.chat import Message
from grpo_core.rollout.environments import Opening, Step


class ReasoningGym:
    """One question at a time."""

    def __init__(self, attempts: int, solved_score: float, decay: float, feedback: str) -> None:
        self._attempts = attempts
        self._solved_score = solved_score
        self._decay = decay
        self._feedback = feedback

    def reset(self, columns: Mapping[str, Any], seed: int) -> Opening:
        import reasoning_gym

        self._score = reasoning_gym.get_score_answer_fn(columns["task"])
        self._entry = json.loads(columns["entry"])
        self._tried = 0
        self._best: float | None = None
        return Opening()

    def step(self, answer: Message) -> Step:
        score = float(self._score(str(answer["content"]).strip(), self._entry))
        worth = score * self._decay**self._tried
        self._best = worth if self._best is None else max(self._best, worth)
        self._tried += 1
        if score >= self._solved_score or self._tried >= self._attempts:
            return Step(done=True)
        return Step(({"role": "user", "content": self._feedback},))

    def reward(self) -> float | None:
        return self._best

    def close(self) -> None:
        """Nothing is held."""
