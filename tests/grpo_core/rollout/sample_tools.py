"""Tools that behave and misbehave."""

from __future__ import annotations

import asyncio
import threading
import time

everybody = threading.Barrier(3)


def calculator(expression: str) -> str:
    """
    Computes a sum.

    Args:
        expression: Whole numbers with + between them.
    """
    return str(sum(int(term) for term in expression.split("+")))


async def look_up(key: str, times: int = 1) -> dict[str, int]:
    """
    Looks a number up.

    Args:
        key: What to look for.
        times: How often.
    """
    await asyncio.sleep(0)
    return {key: times}


def meet(who: str) -> str:
    """
    Waits until three are there.

    Args:
        who: Your name.
    """
    everybody.wait(10)
    return who


async def meet_awaited(who: str) -> str:
    """
    Waits until three are there.

    Args:
        who: Your name.
    """
    return await asyncio.to_thread(meet, who)


def sleep(seconds: float) -> str:
    """
    Sleeps.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "awake"


def leave() -> str:
    """Leaves."""
    raise SystemExit(3)


def undescribed(thing):
    return thing


gate = threading.Event()


def wait() -> str:
    """Waits until it is let go."""
    gate.wait(20)
    return "let go"


def shrink(words: list[str]) -> str:
    """
    Takes a word off.

    Args:
        words: All words.
    """
    return words.pop()


def half_a_pair() -> str:
    """Says what no tokenizer takes."""
    return "a\ud83d"


def cancel() -> str:
    """Raises what asyncio raises in a task that is cancelled."""
    raise asyncio.CancelledError


async def cancel_awaited() -> str:
    """Raises what asyncio raises in a task that is cancelled."""
    raise asyncio.CancelledError


async def leave_awaited() -> str:
    """Leaves."""
    raise SystemExit(3)


def stop() -> str:
    """Looks for something that is not there."""
    return next(iter(()))
