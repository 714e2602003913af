"""Reward functions that behave and misbehave, for the tests of the workers."""

from __future__ import annotations

import asyncio
import math
import os
import re
import subprocess
import sys
import threading
import time
from typing import Any


def lengths(completions: list[Any], **columns: Any) -> list[float]:
    return [float(len(completion[-1]["content"])) for completion in completions]


async def cancelled(completions: list[Any], **columns: Any) -> list[float]:
    raise asyncio.CancelledError


async def awaited(completions: list[Any], **columns: Any) -> list[float]:
    await asyncio.sleep(0)
    return [0.25] * len(completions)


def talkative(completions: list[Any], **columns: Any) -> list[float]:
    print('{"rewards": "not this"}', flush=True)
    os.write(1, b"nor this\n")
    sys.__stdout__.write("nor that\n")
    sys.__stdout__.flush()
    return [1.0] * len(completions)


def uncertain(completions: list[Any], **columns: Any) -> list[float | None]:
    return [None, math.nan, True, 2][: len(completions)]


def on_word(completions: list[Any], word: list[str], **columns: Any) -> list[float]:
    """Does what the column `word` says."""
    words = word[0].removeprefix("fork ")
    if words != word[0] and os.fork() == 0:
        if words.startswith("away"):
            os.setsid()
        time.sleep(20)
        os._exit(0)
    match words.removeprefix("away "):
        case "hang":
            time.sleep(600)
        case "nap":
            time.sleep(0.7)
        case "leak":
            time.sleep(0.2)
            leaked = []
            while True:
                leaked.append(bytes(1 << 20))
        case "hold":
            time.sleep(0.2)
            re.match("(a|a)*b", "a" * 60)
        case "busy":
            while True:
                sum(range(1000))
        case "die":
            time.sleep(0.2)
            os._exit(7)
        case "leave":
            sys.exit(3)
        case "raise":
            raise KeyError("missing\nline")
        case "short":
            return [1.0]
        case "infinite":
            return [math.inf] * len(completions)
        case "text":
            return ["good"] * len(completions)  # type: ignore[list-item]
        case "nothing":
            return None  # type: ignore[return-value]
        case "stop":
            return [next(iter(()))]
        case "cancel":
            raise asyncio.CancelledError
        case "interrupt":
            raise KeyboardInterrupt
        case "wordy":
            raise ValueError("x" * (1 << 27))
        case "complex":
            return [1j] * len(completions)  # type: ignore[list-item]
        case "read":
            # Whatever it starts inherits its input, and must not eat the next groups.
            subprocess.run([sys.executable, "-c", "import sys; sys.stdin.read()"], check=True)
        case "child":
            child = subprocess.Popen(["sleep", "600"])
            return [float(child.pid)] * len(completions)
    return [float(os.getpid())] * len(completions)


def echo_arguments(
    completions: list[Any], prompts: list[Any], completion_ids: list[list[int]], answer: list[str], **columns: Any
) -> list[float]:
    assert [prompt[-1]["content"] for prompt in prompts] == ["q"] * len(completions)
    assert completion_ids == [[1, 2], [3]]
    assert answer == ["4", "4"] and set(columns) == {"other"}
    return [1.0, 2.0]


not_a_function = 3


class Scorer:
    """Scores as a method and as an object."""

    def __call__(self, completions: list[Any], **columns: Any) -> list[float]:
        return [0.5] * len(completions)

    @staticmethod
    def static(completions: list[Any], **columns: Any) -> list[float]:
        return [1.0] * len(completions)


class AwaitedScorer:
    async def __call__(self, completions: list[Any], **columns: Any) -> list[float]:
        return [0.5] * len(completions)


half, half_awaited = Scorer(), AwaitedScorer()
everybody = threading.Barrier(32)


def meet(completions: list[Any], **columns: Any) -> list[float]:
    everybody.wait(20)
    return [1.0] * len(completions)


async def meet_awaited(completions: list[Any], **columns: Any) -> list[float]:
    await asyncio.to_thread(everybody.wait, 20)
    return [1.0] * len(completions)
