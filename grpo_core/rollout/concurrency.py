"""Coroutines side by side, and calls of foreign code, plain or async, with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")


class DeadlinePassed(RuntimeError):
    """A call that had not returned when its time was over."""


async def together(coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """All results in order. When one raises, the others are cancelled and have ended before it goes on from here."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def call_within(seconds: float, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """The result of `function`; raise DeadlinePassed after `seconds`, or what `function` raises.

    A plain function runs on a thread of its own, so that calls overlap and none holds up the event loop. Python cannot
    end a thread: one that is late is left behind and does not keep the process alive.
    """
    try:
        async with asyncio.timeout(seconds) as clock:
            if inspect.iscoroutinefunction(function):
                return await function(*arguments, **named)
            result = await _on_a_thread(function, arguments, named)
            # A callable object or a wrapped coroutine function does not say beforehand that it is async.
            return await result if inspect.isawaitable(result) else result
    except TimeoutError as error:
        if clock.expired():
            raise DeadlinePassed(f"it did not return within {seconds:g} s") from error
        raise


async def _on_a_thread(function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is None:
            outcome.set_result(result)
        else:
            outcome.set_exception(error)

    def run() -> None:
        result: Any = None
        failure: BaseException | None = None
        try:
            result = function(*arguments, **named)
        except (StopIteration, SystemExit, KeyboardInterrupt) as error:
            # To whoever awaits a future these would mean something else.
            failure = RuntimeError(f"it raised {error!r}")
        except BaseException as error:  # noqa: BLE001 - raised again where the call is awaited
            failure = error
        # The loop may have ended while we ran.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, daemon=True, name=f"call of {getattr(function, '__name__', function)}").start()
    return await outcome
