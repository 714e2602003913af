"""A pool of engines on a virtual clock.

Model: an engine decodes up to `slots` sequences at once and makes the others wait, first come first served. All that it
decodes run at the same speed, that of a lone sequence until the engine's own limit is reached and is then shared, so
`service`, the tokens decoded per sequence since the start, only grows, and a sequence of n tokens that begins at
service s ends at s + n. A refit pauses every engine and leaves a mark at the service it happened at; the versions of a
sequence are the marks between its two ends. Prefill and the memory of keys and values are not modelled: give a speed
that was measured with them, and as `slots` what the memory really holds.

Invariants: service never decreases; a sequence is in one engine; siblings stay together, as one request does.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PoolModel:
    """`tokens_per_second` is the speed of one sequence alone, `most_tokens_per_second` the knee: an engine's total."""

    engines: int
    slots: int
    tokens_per_second: float
    most_tokens_per_second: float = math.inf

    @property
    def engine_peak(self) -> float:
        """Tokens per second of one full engine."""
        return min(self.slots * self.tokens_per_second, self.most_tokens_per_second)

    @property
    def peak(self) -> float:
        """Tokens per second of the whole pool when every slot is taken."""
        return self.engines * self.engine_peak


@dataclass(slots=True, eq=False)
class Group:
    """One attempt at the group of an ordinal, of the tokens `lengths`; `version` was live when it was leased. `tokens`
    maps a version to what the members that finished have of it."""

    ordinal: int
    lease: int
    version: int
    tried: int
    lengths: tuple[float, ...]
    fails: bool
    zero_variance: bool
    remaining: int = 0
    tokens: dict[int, float] = field(default_factory=dict)

    @property
    def oldest_version(self) -> int:
        return min(self.tokens, default=self.version)

    @property
    def newest_version(self) -> int:
        return max(self.tokens, default=self.version)

    @property
    def generated(self) -> float:
        """Tokens of the members that finished."""
        return math.fsum(self.tokens.values())


class Engine:
    """One engine. Whoever calls a method that changes it first calls `advance` to the present, then asks `due` when the
    next sequence ends."""

    def __init__(self, model: PoolModel, version: int) -> None:
        self._model = model
        self._service = 0.0
        self._at = 0.0
        self._running: list[tuple[float, int, float, Group]] = []
        self._waiting: deque[tuple[Group, float]] = deque()
        self._serial = 0
        self._marks = [-1.0]
        self._versions = [version]
        self.paused = False
        self.alive = True
        self.epoch = 0
        self.generated = 0.0

    @property
    def load(self) -> int:
        """Sequences decoding or waiting."""
        return len(self._running) + len(self._waiting)

    @property
    def unfinished_tokens(self) -> float:
        """Tokens that the running sequences have got so far."""
        return math.fsum(self._service - start for _, _, start, _ in self._running)

    def advance(self, now: float) -> None:
        """Decode until `now`."""
        rate = self._rate()
        self._service += rate * (now - self._at)
        self.generated += len(self._running) * rate * (now - self._at)
        self._at = now

    def submit(self, group: Group) -> None:
        """Take the members of a group."""
        group.remaining = len(group.lengths)
        self._waiting.extend((group, length) for length in group.lengths)
        self._fill()

    def refit(self, version: int) -> None:
        """From here on tokens are of `version`."""
        self._marks.append(self._service)
        self._versions.append(version)

    def due(self) -> float | None:
        """When the next sequence ends; None while nothing moves."""
        rate = self._rate()
        return self._at + max(0.0, self._running[0][0] - self._service) / rate if rate else None

    def finish(self) -> list[Group]:
        """Take out the sequence that is due, and any that ends with it; the groups whose last member that was."""
        end, complete = max(self._service, self._running[0][0]), []
        while self._running and self._running[0][0] <= end:
            finish, _, start, group = heapq.heappop(self._running)
            self._credit(group, start, finish)
            group.remaining -= 1
            if not group.remaining:
                complete.append(group)
        self._fill()
        return complete

    def withdraw(self, group: Group) -> float:
        """Stop the members of a group; the tokens that they had got so far."""
        lost = math.fsum(self._service - start for _, _, start, other in self._running if other is group)
        self._running = [entry for entry in self._running if entry[3] is not group]
        heapq.heapify(self._running)
        self._waiting = deque(entry for entry in self._waiting if entry[0] is not group)
        self._fill()
        return lost

    def _rate(self) -> float:
        """Tokens per second of each running sequence."""
        if self.paused or not self.alive or not self._running:
            return 0.0
        return min(self._model.tokens_per_second, self._model.most_tokens_per_second / len(self._running))

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._model.slots:
            group, length = self._waiting.popleft()
            self._serial += 1
            heapq.heappush(self._running, (self._service + length, self._serial, self._service, group))

    def _credit(self, group: Group, start: float, finish: float) -> None:
        """Book the tokens of a finished member under the versions that made them."""
        index = bisect_right(self._marks, start) - 1
        tokens = group.tokens
        while True:
            end = finish if index + 1 == len(self._marks) else min(finish, self._marks[index + 1])
            if end > start:
                version = self._versions[index]
                tokens[version] = tokens.get(version, 0.0) + end - start
            if end == finish:
                return
            start, index = end, index + 1


class Pool:
    """The engines, and where each group is. Groups wait here while no engine takes them."""

    def __init__(self, model: PoolModel) -> None:
        self.engines = [Engine(model, 0) for _ in range(model.engines)]
        self.held: list[Group] = []
        self.draining = False
        self._places: dict[Group, Engine] = {}

    @property
    def generated(self) -> float:
        """Tokens decoded so far, by all engines."""
        return math.fsum(engine.generated for engine in self.engines)

    @property
    def idle(self) -> bool:
        """Whether no engine has anything to decode."""
        return not any(engine.load for engine in self.engines)

    @property
    def unfinished_tokens(self) -> float:
        """Tokens that sequences still running have got so far."""
        return math.fsum(engine.unfinished_tokens for engine in self.engines)

    def release(self) -> list[Group]:
        """The groups that waited here, no longer held."""
        released, self.held = self.held, []
        return released

    def submit(self, group: Group, now: float) -> Engine | None:
        """Give a group to the least loaded living engine; None if it must wait here."""
        living = [engine for engine in self.engines if engine.alive]
        if not living or self.draining:
            self.held.append(group)
            return None
        engine = min(living, key=lambda each: each.load)
        engine.advance(now)
        engine.submit(group)
        self._places[group] = engine
        return engine

    def forget(self, group: Group) -> None:
        """A group is complete."""
        del self._places[group]

    def withdraw(self, groups: Iterable[Group], now: float) -> tuple[float, set[Engine]]:
        """Stop generating these groups, as far as they are here; the tokens that their unfinished members had, and the
        engines that changed."""
        lost, touched = 0.0, set()
        for group in groups:
            engine = self._places.pop(group, None)
            if engine is None:
                self.held = [other for other in self.held if other is not group]
                continue
            engine.advance(now)
            lost += engine.withdraw(group)
            touched.add(engine)
        return lost, touched

    def on(self, engine: Engine) -> list[Group]:
        """The groups that this engine has."""
        return [group for group, place in self._places.items() if place is engine]
