"""Which engine takes the next request.

Contract: a request goes to an admitted engine with room, in order of asking: to the one that holds its prefix unless
that one is much busier, else to the least loaded. An engine is admitted only while it carries the newest live version;
without one, requests wait, within their deadline. An engine that just failed a request rests, unless there is no other.
While every admitted engine is at its limit, requests wait without a deadline: their lease has one. The router is shared
by all generation threads of a process; it holds no state that matters after a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from grpo_core.trajectory import Stamp

# Between two looks at whether any engine is admitted; whoever is given one hears of it at once.
WAIT_SECONDS = 0.25
# An engine that lost a request is asked again after this long; by then a dead one has been ejected.
REST_SECONDS = 5.0
# A prefix is worth this many requests of extra load: reading it again costs about as much as one of them.
PREFIX_SLACK = 16
# Prefixes whose engine is remembered; the oldest are forgotten first.
MOST_PREFIXES = 65536


def is_overdue(request: InFlight, oldest: int, *, masked: bool, adapters: bool) -> bool:
    """Whether for certain nothing of what a request still brings can be trained, when no step to come admits tokens of
    versions before `oldest`. Pure.

    Where a token beyond the window costs the whole group (grpo.async_grpo.stale_policy=drop or wait), the version that
    the rollout began under decides. Where such tokens are only `masked`, the next token of a request is of the newest
    version and admissible, however old the rollout is;
    unless requests name `adapters`, under which each of them then ends.
    """
    if not masked:
        return request.since.version < oldest
    return adapters and request.asked.version < oldest


class NoEngine(RuntimeError):
    """No engine was admitted in time."""


@dataclass(slots=True)
class Member:
    """One engine as the router sees it. `limit` is the most requests it should have, None for no limit."""

    name: str
    url: str
    admitted: bool = False
    load: int = 0
    limit: int | None = None
    rests_until: float = 0.0

    def has_room(self, weight: int) -> bool:
        return self.limit is None or self.load == 0 or self.load + weight <= self.limit


@dataclass(frozen=True, slots=True)
class InFlight:
    """A request that an engine is at. `since` is the version its rollout began under, `asked` the one that was live
    when the request was sent."""

    request_id: str
    engine: str
    url: str
    since: Stamp
    asked: Stamp


@dataclass(eq=False, slots=True)
class _Ticket:
    """A request that waits for its engine, on the event loop that made this; `served` is set there when it has one."""

    weight: int
    prefixes: Sequence[str]
    avoid: frozenset[str]
    member: Member | None = None
    served: asyncio.Event = field(default_factory=asyncio.Event)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def give(self, member: Member) -> None:
        """Called from any thread."""
        self.member = member
        # A loop that has ended has nobody left who waits.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.served.set)


class Pool:
    """The router. `stamp` is the newest live version."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._members: dict[str, Member] = {}
        self._queue: list[_Ticket] = []
        self._prefixes: OrderedDict[str, str] = OrderedDict()
        self._in_flight: dict[str, InFlight] = {}
        self.stamp: Stamp | None = None

    def join(self, name: str, url: str) -> None:
        """Know an engine; it gets no request before it is admitted."""
        with self._lock:
            self._members[name] = Member(name, url)

    def leave(self, name: str) -> None:
        """Forget an engine; its requests fail by themselves, or end when it still lives."""
        with self._lock:
            self._members.pop(name, None)

    def live(self, stamp: Stamp, engines: tuple[str, ...]) -> None:
        """`engines` carry `stamp`, the newest version; no other engine gets requests."""
        with self._lock:
            self.stamp = stamp
            for member in self._members.values():
                member.admitted = member.name in engines
            self._serve()

    def admit(self, name: str) -> None:
        """An engine that joined late carries the newest version now."""
        with self._lock:
            self._members[name].admitted = True
            self._serve()

    def limit(self, name: str, limit: int | None) -> None:
        """Give the engine at most so many requests from now on."""
        with self._lock:
            if name in self._members:
                self._members[name].limit = limit
            self._serve()

    def failed(self, name: str) -> None:
        """An engine lost a request: let it rest while there are others."""
        with self._lock:
            if name in self._members:
                self._members[name].rests_until = self._clock() + REST_SECONDS

    def members(self) -> list[Member]:
        """A snapshot, in order of joining."""
        with self._lock:
            return [replace(member) for member in self._members.values()]

    def load(self) -> int:
        """Requests in flight over all engines."""
        with self._lock:
            return sum(member.load for member in self._members.values())

    def waiting(self) -> int:
        """Requests that wait for an engine."""
        with self._lock:
            return sum(ticket.weight for ticket in self._queue)

    def in_flight(self) -> list[InFlight]:
        """The requests that engines are at, of those that have an id."""
        with self._lock:
            return list(self._in_flight.values())

    @asynccontextmanager
    async def engine(
        self,
        *,
        weight: int,
        deadline_seconds: float,
        prefixes: Sequence[str] = (),
        avoid: Iterable[str] = (),
        request_id: str | None = None,
        since: Stamp | None = None,
    ) -> AsyncIterator[Member]:
        """An engine for a request that counts as `weight`. Raise NoEngine when none is admitted within the deadline.

        `prefixes` name what the request shares with others (its rollout, then its group): the engine that served the
        first of them that is known is preferred. `avoid` are engines that failed it already. With a `request_id` the
        request is listed by `in_flight`, as one of a rollout that began under `since` (default: now).
        """
        member = await self._wait(_Ticket(weight, prefixes, frozenset(avoid)), deadline_seconds)
        if request_id is not None and (stamp := self.stamp) is not None:
            with self._lock:
                self._in_flight[request_id] = InFlight(request_id, member.name, member.url, since or stamp, stamp)
        try:
            yield member
        finally:
            with self._lock:
                self._in_flight.pop(request_id or "", None)
                member.load -= weight
                self._serve()

    async def _wait(self, ticket: _Ticket, deadline_seconds: float) -> Member:
        deadline = self._clock() + deadline_seconds
        with self._lock:
            self._queue.append(ticket)
            self._serve()
        try:
            while ticket.member is None:
                if self._anyone_admitted():
                    deadline = self._clock() + deadline_seconds
                elif self._clock() > deadline:
                    raise NoEngine(
                        f"no engine of the pool carried the newest version within {deadline_seconds:g} s; see the engines' logs"
                    )
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(WAIT_SECONDS):
                        await ticket.served.wait()
            return ticket.member
        except BaseException:
            with self._lock:
                if ticket.member is not None:
                    ticket.member.load -= ticket.weight
                    self._serve()
                else:
                    self._queue.remove(ticket)
            raise

    def _anyone_admitted(self) -> bool:
        with self._lock:
            return any(member.admitted for member in self._members.values())

    def _serve(self) -> None:
        """Give engines to waiting requests, in their order, until one finds no room. Needs the lock."""
        while self._queue:
            ticket = self._queue[0]
            member = self._choose(ticket)
            if member is None:
                return
            member.load += ticket.weight
            for prefix in ticket.prefixes:
                self._prefixes[prefix] = member.name
                self._prefixes.move_to_end(prefix)
            while len(self._prefixes) > MOST_PREFIXES:
                self._prefixes.popitem(last=False)
            self._queue.pop(0)
            ticket.give(member)

    def _choose(self, ticket: _Ticket) -> Member | None:
        """The engine for a request; None while none has room. Needs the lock."""
        admitted = [member for member in self._members.values() if member.admitted]
        now = self._clock()
        fresh = [member for member in admitted if member.rests_until <= now and member.name not in ticket.avoid]
        candidates = [member for member in fresh or admitted if member.has_room(ticket.weight)]
        if not candidates:
            return None
        least = min(candidates, key=lambda member: member.load)
        for prefix in ticket.prefixes:
            for member in candidates:
                if member.name == self._prefixes.get(prefix) and member.load <= least.load + PREFIX_SLACK:
                    return member
        return least
