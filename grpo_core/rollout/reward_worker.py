"""The child process in which reward functions run, until its input closes. JSON lines in, JSON lines out.

    python -m grpo_core.rollout.reward_worker MEMORY_BYTES module:function…

In: {"id", "prompts", "completions", "completion_ids", "columns"}. Out, once: {"ready": true} or {"error"}; then per
group {"id", "rewards"} or {"id", "error"}, in any order, and {"tick": true} every TICK_SECONDS while there is a group:
a worker that does not tick is held up as a whole, as by a regular expression that backtracks for ever.

Every group has a thread and an event loop of its own, so that none waits for another. Whatever a function raises is an
answer at once, except that it may end the process. Neither it nor a process that it starts has our input or output. The
input closes when the parent ends, however it ends; the worker then ends at once, in the middle of a call too, together
with what was started from it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, TextIO

from grpo_core.rollout.importable import imported

Function = Callable[..., Any]

TICK_SECONDS = 0.25
# Exit status of a worker that needed more memory than it may have.
OUT_OF_MEMORY = 77
# Characters of an error that an answer holds.
LONGEST_ERROR = 2000


async def score(functions: dict[str, Function], call: dict[str, Any]) -> dict[str, list[float | None]]:
    """All functions of one group, concurrently."""
    arguments = {name: call[name] for name in ("completions", "prompts", "completion_ids")}

    async def one(name: str, function: Function) -> list[float | None]:
        """What one function gives to each completion. Raise an error that names it."""
        try:
            if inspect.iscoroutinefunction(function):
                values = await function(**arguments, **call["columns"])
            else:
                values = await asyncio.to_thread(_called, function, {**arguments, **call["columns"]})
                # A callable object does not say beforehand that it is async.
                values = await values if inspect.isawaitable(values) else values
            return [_number(value) for value in values]
        except MemoryError:
            # At once: what the function holds is held until this is handled, and nothing else has room to work.
            os._exit(OUT_OF_MEMORY)
        except SystemExit:
            raise
        except BaseException as error:
            # Also what would else pass for a cancellation of ours, and leave the group waiting for its deadline.
            where = traceback.extract_tb(error.__traceback__)[-1]
            raise ValueError(
                f"reward function {name} raised {type(error).__name__}: {error} ({where.name}, line {where.lineno})"
            ) from error

    values = await asyncio.gather(*(one(name, function) for name, function in functions.items()))
    return dict(zip(functions, values, strict=True))


def _called(function: Function, arguments: dict[str, Any]) -> Any:
    try:
        return function(**arguments)
    except StopIteration as error:
        # No future can hold one.
        raise RuntimeError(f"it raised {error!r}").with_traceback(error.__traceback__) from None


def _number(value: Any) -> float | None:
    if value is None:
        return None
    number = float(value)
    if math.isinf(number):
        raise ValueError(f"it returned {number}; return a finite number, or None where there is no score")
    return None if math.isnan(number) else number


class Answers:
    """The way back to the parent, for all threads. `open_calls` counts the groups that are being scored."""

    def __init__(self) -> None:
        # What a reward function prints must not end up between our answers.
        self._output = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self.open_calls = 0

    def write(self, value: dict[str, Any]) -> None:
        with self._lock:
            self._output.write(json.dumps(value) + "\n")
            self._output.flush()

    def begin(self) -> None:
        with self._lock:
            self.open_calls += 1

    def end(self, value: dict[str, Any]) -> None:
        self.write(value)
        with self._lock:
            self.open_calls -= 1


def _calls() -> TextIO:
    """The calls of the parent, which nobody else can read from now on: a process that a reward function starts would
    take them for its own input."""
    calls = os.fdopen(os.dup(0), encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return calls


def main(memory_bytes: int, names: list[str]) -> None:
    """Serve calls on the pipes we were started with."""
    calls, answers = _calls(), Answers()
    try:
        functions = {name: imported(name, "reward function") for name in names}
    except ValueError as error:
        answers.write({"error": str(error)})
        return
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    answers.write({"ready": True})
    stopped = threading.Event()
    threading.Thread(target=_tick, args=(answers, stopped), daemon=True).start()
    for line in calls:
        answers.begin()
        threading.Thread(target=_serve, args=(functions, line, answers), daemon=True).start()
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _serve(functions: dict[str, Function], line: str, answers: Answers) -> None:
    """Score one group and answer. Ends the process where a function asks for it."""
    try:
        call = json.loads(line)
        answer = {"id": call["id"], "rewards": asyncio.run(score(functions, call))}
    except ValueError as error:
        answer = {"id": call["id"], "error": str(error)[:LONGEST_ERROR]}
    except SystemExit as error:
        os._exit(error.code if isinstance(error.code, int) else 1)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    answers.end(answer)


def _tick(answers: Answers, stopped: threading.Event) -> None:
    while not stopped.wait(TICK_SECONDS):
        if answers.open_calls:
            answers.write({"tick": True})


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
