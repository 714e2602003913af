"""The child process in which reward functions run: one JSON line in, one JSON line out, until its input closes.

Its input closes when the parent ends, however it ends; the worker then ends at once, in the middle of a call too.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

RewardFunction = Callable[..., Any]


def resolve(name: str) -> RewardFunction:
    """The function called `module:function`. Raise ValueError with one sentence."""
    module_name, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:
        raise ValueError(
            f"reward function {name} cannot be imported ({type(error).__name__}: {error}); give module:function on the Python path"
        ) from error
    if not callable(function):
        raise ValueError(f"reward function {name} is a {type(function).__name__}, not a function; give module:function")
    return function  # type: ignore[no-any-return]


async def score(functions: dict[str, RewardFunction], call: dict[str, Any]) -> dict[str, list[float | None]]:
    """All functions of one group, concurrently."""
    arguments = {name: call[name] for name in ("completions", "prompts", "completion_ids")}

    async def one(name: str, function: RewardFunction) -> list[float | None]:
        try:
            if inspect.iscoroutinefunction(function):
                values = await function(**arguments, **call["columns"])
            else:
                values = await asyncio.to_thread(function, **arguments, **call["columns"])
            return [_number(value) for value in values]
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            raise ValueError(
                f"reward function {name} raised {type(error).__name__}: {error} ({where.name}, line {where.lineno})"
            ) from error

    values = await asyncio.gather(*(one(name, function) for name, function in functions.items()))
    return dict(zip(functions, values, strict=True))


def _number(value: Any) -> float | None:
    if value is None:
        return None
    number = float(value)
    if math.isinf(number):
        raise ValueError(f"it returned {number}; return a finite number, or None where there is no score")
    return None if math.isnan(number) else number


def main(names: list[str]) -> None:
    """Serve calls on the pipes we were started with."""
    # What a reward function prints must not end up between our answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        functions = {name: resolve(name) for name in names}
    except ValueError as error:
        answer({"error": str(error)})
        return
    answer({"ready": True})
    calls: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(calls,), daemon=True).start()
    while True:
        try:
            answer({"rewards": asyncio.run(score(functions, json.loads(calls.get())))})
        except ValueError as error:
            answer({"error": str(error)})


def _receive(calls: queue.SimpleQueue[str]) -> None:
    """Hand over the calls; end the process with its input, whatever a reward function is doing."""
    for line in sys.stdin:
        calls.put(line)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
