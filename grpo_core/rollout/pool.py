"""Which engine takes the next request.

Contract: a request goes to the admitted engine with the least load. An engine is admitted only while it carries
the newest live version; without one, requests wait, within their deadline. The router is shared by all generation
threads of a process; it holds no state that matters after a restart.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from grpo_core.trajectory import Stamp

WAIT_SECONDS = 0.1


class NoEngine(RuntimeError):
    """No engine was admitted in time."""


@dataclass(slots=True)
class Member:
    """One engine as the router sees it."""

    name: str
    url: str
    admitted: bool = False
    load: int = 0


class Pool:
    """The router. `stamp` is the newest live version."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: dict[str, Member] = {}
        self.stamp: Stamp | None = None

    def join(self, name: str, url: str) -> None:
        """Know an engine; it gets no request before it is admitted."""
        with self._lock:
            self._members[name] = Member(name, url)

    def leave(self, name: str) -> None:
        """Forget an engine; its requests fail by themselves."""
        with self._lock:
            self._members.pop(name, None)

    def live(self, stamp: Stamp, engines: tuple[str, ...]) -> None:
        """`engines` carry `stamp`, the newest version; no other engine gets requests."""
        with self._lock:
            self.stamp = stamp
            for member in self._members.values():
                member.admitted = member.name in engines

    def admit(self, name: str) -> None:
        """An engine that joined late carries the newest version now."""
        with self._lock:
            self._members[name].admitted = True

    def members(self) -> list[Member]:
        """A snapshot, in order of joining."""
        with self._lock:
            return [Member(member.name, member.url, member.admitted, member.load) for member in self._members.values()]

    def load(self) -> int:
        """Requests in flight over all engines."""
        with self._lock:
            return sum(member.load for member in self._members.values())

    @asynccontextmanager
    async def engine(self, *, weight: int, deadline_seconds: float) -> AsyncIterator[Member]:
        """The least-loaded admitted engine, `weight` requests heavier meanwhile. Raise NoEngine at the deadline."""
        deadline = time.monotonic() + deadline_seconds
        while (member := self._take(weight)) is None:
            if time.monotonic() > deadline:
                raise NoEngine(
                    f"no engine of the pool carried the newest version within {deadline_seconds:g} s; see the engines' logs"
                )
            await asyncio.sleep(WAIT_SECONDS)
        try:
            yield member
        finally:
            with self._lock:
                member.load -= weight

    def _take(self, weight: int) -> Member | None:
        with self._lock:
            member = min((m for m in self._members.values() if m.admitted), key=lambda m: m.load, default=None)
            if member is not None:
                member.load += weight
            return member
