"""Coroutines side by side, and calls of foreign code, plain or async, with a deadline.

Invariants: a plain function runs on a thread of its own, so that calls overlap, none holds up the event loop and no
pool runs dry. Python cannot end a thread: one whose call was late or given up is left behind, counted until it returns,
and does not keep the process alive; with MOST_LEFT_BEHIND of them no further call is made. Whatever foreign code
raises comes out as an Exception, so that it can be taken neither for our own cancellation nor for the process's end.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")

# Threads that wait for ever cost little; so many say that what they wait for is broken, not slow.
MOST_LEFT_BEHIND = 64
# Between two looks whether work is to stop, and how long it may then take to let go of what it holds.
STOP_POLL_SECONDS, STOP_SECONDS = 0.2, 5.0


class DeadlinePassed(RuntimeError):
    """A call that had not returned when its time was over."""


class CallsHang(RuntimeError):
    """So many earlier calls never returned that no further one is made, which is no fault of whoever asks for it."""


def on_a_loop_of_its_own(work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, for a thread that waits for it. Raises Exceptions only: foreign code may have left a task
    in the loop, where nobody awaits it, and what that raises ends the loop when it is no Exception."""
    try:
        return asyncio.run(work)
    except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
        raise _plain(error) from error


async def unless_stopped(work: Coroutine[Any, Any, Result], stopped: Callable[[], bool], error: Exception) -> Result:
    """The result of `work`. When `stopped` says so before there is one, it is cancelled and `error` is raised."""
    task = asyncio.ensure_future(work)
    while not task.done():
        await asyncio.wait({task}, timeout=STOP_POLL_SECONDS)
        if stopped() and not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=STOP_SECONDS)
            raise error
    return task.result()


async def together(coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """All results in order. When one raises, the others are cancelled and have ended before it goes on from here."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _ignore(result: Any) -> None:
    """Nobody misses it."""


class ForeignCalls:
    """Calls of one kind of foreign code, which `what` names in errors. Thread-safe; used from many event loops."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._left_behind = 0

    @property
    def left_behind(self) -> int:
        """Calls that have not returned though nobody waits for them any more."""
        return self._left_behind

    async def within(
        self, seconds: float, function: Callable[[], Any], *, unwanted: Callable[[Any], None] = _ignore
    ) -> Any:
        """The result of `function`. Raise DeadlinePassed after `seconds`, CallsHang, or what `function` raises.

        What a plain function returns after its call was late or cancelled is given to `unwanted`, on any thread.
        """
        try:
            async with asyncio.timeout(seconds) as clock:
                if inspect.iscoroutinefunction(function):
                    return await _awaited(function())
                result = await self.on_a_thread(function, unwanted=unwanted)
                # A callable object or a wrapped coroutine function does not say beforehand that it is async.
                return await _awaited(result) if inspect.isawaitable(result) else result
        except TimeoutError as error:
            if clock.expired():
                raise DeadlinePassed(f"it did not return within {seconds:g} s") from error
            raise

    async def on_a_thread(self, function: Callable[[], Any], *, unwanted: Callable[[Any], None] = _ignore) -> Any:
        """As `within` for a plain function, where whoever waits has the deadline."""
        if self._left_behind >= MOST_LEFT_BEHIND:
            raise CallsHang(
                f"{self._left_behind} calls of {self._what} have not returned long after their deadlines; give what they "
                "wait for a deadline of its own"
            )
        outcome: Future[Any] = Future()
        # From here on it cannot be cancelled, only left behind.
        outcome.set_running_or_notify_cancel()
        threading.Thread(target=_settle, args=(outcome, function), daemon=True, name=self._what).start()
        try:
            return await asyncio.wrap_future(outcome)
        except asyncio.CancelledError:
            with self._lock:
                self._left_behind += 1
            outcome.add_done_callback(lambda done: self._returned(done, unwanted))
            raise

    def _returned(self, outcome: Future[Any], unwanted: Callable[[Any], None]) -> None:
        """A call that was left behind has come back."""
        with self._lock:
            self._left_behind -= 1
        if outcome.exception() is None:
            # A thread of its own, since the call may have returned in the very moment
            # when we left it: we may be on the loop.
            threading.Thread(target=unwanted, args=(outcome.result(),), daemon=True, name=self._what).start()


class LoopThread:
    """An event loop of its own for foreign coroutines, whose locks and connections belong to one loop for good."""

    def __init__(self, what: str) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name=what).start()

    async def result(self, awaitable: Awaitable[Any]) -> Any:
        """What comes of `awaitable` there; it is cancelled with whoever waits here."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_awaited(awaitable), self._loop))


def _settle(outcome: Future[Any], function: Callable[[], Any]) -> None:
    try:
        result = function()
    except BaseException as error:  # noqa: BLE001 - raised again where the call is awaited
        outcome.set_exception(_plain(error))
    else:
        outcome.set_result(result)


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise _plain(error) from error
    except Exception:
        raise
    except BaseException as error:
        raise _plain(error) from error


def _plain(error: BaseException) -> Exception:
    """The error as one that says nothing about us: StopIteration
    and what is no Exception mean something else to whoever awaits them."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"it raised {error!r}")
