"""Reward functions of the scenarios; found through PYTHONPATH, as a user's own would be."""

from typing import Any


def even_share(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The share of even token ids: a random policy gets some of it, siblings differ, and it can be learnt."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def raising(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    raise ValueError("the grader is out of order")


not_a_function = 3
