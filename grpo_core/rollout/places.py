"""Room for a bounded number of things at once, shared out in the order in which it was asked for.

Invariants: whoever asks gets all its places at once, or waits with none, so that two never wait for each other's;
nobody is overtaken, so that nobody waits for ever behind smaller ones: the oldest group is also the one that is needed
first; more places than there are may be had by one alone. Thread-safe; used from many event loops.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass


class NoRoom(RuntimeError):
    """Places that did not become free in time."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """Someone who asked for `count` places. `wake` tells them, from any thread, that they have been given them."""

    count: int
    wake: Callable[[], object]
    has_them: bool = False


class Places:
    """`total` places."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._lock = threading.Lock()
        self._queue: deque[_Waiting] = deque()
        self._taken = 0

    @asynccontextmanager
    async def taken(self, count: int, *, deadline_seconds: float) -> AsyncIterator[None]:
        """`count` places, as long as this context lasts. Raise NoRoom when they are not to be had by the deadline."""
        loop, given = asyncio.get_running_loop(), asyncio.Event()
        waiting = _Waiting(count, lambda: loop.call_soon_threadsafe(given.set))
        try:
            self._join(waiting)
            try:
                async with asyncio.timeout(deadline_seconds):
                    await given.wait()
            except TimeoutError as error:
                raise NoRoom(
                    f"{count} of {self._total} places did not become free within {deadline_seconds:g} s"
                ) from error
            yield
        finally:
            self._leave(waiting)

    def _join(self, waiting: _Waiting) -> None:
        with self._lock:
            self._queue.append(waiting)
            self._admit()

    def _leave(self, waiting: _Waiting) -> None:
        with self._lock:
            if waiting.has_them:
                self._taken -= waiting.count
            else:
                self._queue.remove(waiting)
            self._admit()

    def _admit(self) -> None:
        """Give the first in the queue what is free, as long as it is enough."""
        while self._queue and (not self._taken or self._taken + self._queue[0].count <= self._total):
            first = self._queue.popleft()
            self._taken += first.count
            first.has_them = True
            first.wake()
