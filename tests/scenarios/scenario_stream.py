"""A stream of prompts for the scenarios; found through PYTHONPATH, as a user's own would be."""

from collections.abc import Iterator


def sums(*, skip: int, count: int) -> Iterator[dict[str, str]]:
    for number in range(skip, count):
        yield {"prompt": f"{number % 7} + {number % 5} ="}
