"""An environment of the scenarios; found through PYTHONPATH, as a user's own would be."""

import os
import signal
from collections.abc import Mapping
from typing import Any

from grpo_core.rollout.environments import Opening, Step


class Deadly:
    """Says nothing, but takes the process down that asks it about one particular prompt."""

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt

    def reset(self, columns: Mapping[str, Any], seed: int) -> Opening:
        if columns["prompt"][-1]["content"] == self._prompt:
            os.kill(os.getpid(), signal.SIGKILL)
        return Opening()

    def step(self, answer: Mapping[str, Any]) -> Step:
        return Step(done=True)

    def reward(self) -> None:
        return None

    def close(self) -> None:
        return None
