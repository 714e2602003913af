"""Reward functions of the scenarios; found through PYTHONPATH, as a user's own would be."""

import os
import time
from pathlib import Path
from typing import Any

HOLD = "hold-evaluation"


def even_share(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The share of even token ids: a random policy gets some of it, siblings differ, and it can be learnt."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def even_share_when_let(prompts: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The same, but held-out prompts are not scored while there is a file HOLD in the run's directory."""
    hold = Path(os.environ["FOREBAY_SCENARIO"]) / HOLD
    while prompts[0][-1]["content"][0] in "56" and hold.exists():
        time.sleep(0.05)
    return even_share(completion_ids)


def raising(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    raise ValueError("the grader is out of order")


not_a_function = 3
