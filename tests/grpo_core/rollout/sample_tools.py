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
