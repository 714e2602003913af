"""Where every ordinal is: a pure state machine over the endless prompt stream.

An ordinal is new, in flight, buffered, returned, trained or dropped. Trained and dropped are terminal; the
frontier is the lowest ordinal that is not terminal. Allowed moves:

    new, returned                → in flight     `lease` chooses them, `leased` observes somebody else's choice
    in flight                    → buffered
    in flight, buffered          → returned
    buffered                     → trained
    in flight, buffered, returned → dropped

Invariants:
  * every ordinal is in exactly one state, and a call that names an illegal move changes nothing;
  * cut ≤ every ordinal that is held in memory < next_ordinal, and the cut never decreases;
  * resuming leases again exactly the ordinals below next_ordinal that are neither terminal nor kept buffered, in
    ascending order, so nothing is skipped and nothing is trained twice.

Terminal ordinals below the frontier are forgotten: the ledger knows their step or reason. So memory, checkpoints and
every operation cost in proportion to the ordinals that are open, whatever the length of the run.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from types import MappingProxyType
from typing import Any


class FrontierError(ValueError):
    """A move that the state of an ordinal does not allow, or a FrontierState that contradicts itself."""


class OrdinalState(StrEnum):
    """The life of one ordinal. SETTLED: trained or dropped below the frontier; the ledger says which."""

    NEW = "new"
    IN_FLIGHT = "in_flight"
    BUFFERED = "buffered"
    RETURNED = "returned"
    TRAINED = "trained"
    DROPPED = "dropped"
    SETTLED = "settled"


@dataclass(frozen=True, slots=True)
class Counts:
    """How many ordinals of the run are in each state; `dropped` by reason."""

    trained: int
    dropped: dict[str, int]
    buffered: int
    in_flight: int
    returned: int

    @property
    def open(self) -> int:
        """Ordinals that are leased and neither given back nor at their end."""
        return self.in_flight + self.buffered

    @property
    def settled(self) -> int:
        """Ordinals in a terminal state."""
        return self.trained + sum(self.dropped.values())

    @property
    def leased(self) -> int:
        """Ordinals that have been leased at least once: the sum over all states (DESIGN §4, conservation)."""
        return self.settled + self.open + self.returned


@dataclass(frozen=True, slots=True)
class FrontierState:
    """What a checkpoint keeps of a Frontier. Lists are ascending; dicts go from ordinal to value.

    `dropped_totals` counts the drops of the whole run by reason. Raises FrontierError when the parts contradict
    each other, so a damaged checkpoint cannot become a Frontier.
    """

    cut: int
    next_ordinal: int
    step: int
    trained_above_cut: list[int]
    dropped_above_cut: list[int]
    buffered: list[int]
    failure_counts: dict[int, int]
    target_steps: dict[int, int]
    dropped_totals: dict[str, int]

    def __post_init__(self) -> None:
        if not 0 <= self.cut <= self.next_ordinal:
            raise FrontierError(
                f"frontier state has cut {self.cut} and next_ordinal {self.next_ordinal}, but 0 ≤ cut ≤ next_ordinal "
                "must hold: resume from another checkpoint"
            )
        seen: set[int] = set()
        for name in ("trained_above_cut", "dropped_above_cut", "buffered"):
            for ordinal in getattr(self, name):
                if ordinal in seen or not self.cut <= ordinal < self.next_ordinal:
                    raise FrontierError(
                        f"frontier state lists ordinal {ordinal} in {name}, where it is either a repetition or outside "
                        f"[{self.cut}, {self.next_ordinal}): resume from another checkpoint"
                    )
                seen.add(ordinal)

    def to_json(self) -> dict[str, Any]:
        """A dict that `json.dumps` takes and `from_json` reads back."""
        return {
            name: {str(key): item for key, item in value.items()} if isinstance(value, dict) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> FrontierState:
        """Inverse of `to_json`; raises FrontierError for missing or unknown keys."""
        expected = {item.name for item in fields(cls)}
        if set(document) != expected:
            raise FrontierError(
                f"frontier state has the keys {sorted(document)} instead of {sorted(expected)}: "
                "resume from a checkpoint of this version"
            )
        values = dict(document)
        for name in ("failure_counts", "target_steps"):
            values[name] = {int(ordinal): value for ordinal, value in document[name].items()}
        return cls(**values)


_HELD = (
    OrdinalState.NEW,
    OrdinalState.IN_FLIGHT,
    OrdinalState.BUFFERED,
    OrdinalState.RETURNED,
    OrdinalState.TRAINED,
    OrdinalState.DROPPED,
)
_OPEN = (OrdinalState.IN_FLIGHT, OrdinalState.BUFFERED, OrdinalState.RETURNED)


class Frontier:
    """The states of all ordinals. Not thread-safe; does no I/O. Ordinals in arguments may come in any order."""

    def __init__(self) -> None:
        self._frontier = 0
        self._next_ordinal = 0
        self._step = 0
        # NEW holds only the gaps that `leased` left below next_ordinal; all above are new without being listed.
        self._members: dict[OrdinalState, set[int]] = {state: set() for state in _HELD}
        self._failure_counts: dict[int, int] = {}
        self._target_steps: dict[int, int] = {}
        self._dropped_totals: dict[str, int] = {}

    @property
    def frontier(self) -> int:
        """The lowest ordinal that is neither trained nor dropped."""
        return self._frontier

    @property
    def next_ordinal(self) -> int:
        """One more than the highest ordinal ever leased."""
        return self._next_ordinal

    @property
    def step(self) -> int:
        """The latest step that trained anything; 0 before the first."""
        return self._step

    @property
    def failure_counts(self) -> Mapping[int, int]:
        """Failed attempts per open ordinal."""
        return MappingProxyType(self._failure_counts)

    @property
    def target_steps(self) -> Mapping[int, int]:
        """The step that an open ordinal is bound to, where it is bound to one."""
        return MappingProxyType(self._target_steps)

    def state(self, ordinal: int) -> OrdinalState:
        """The state of one ordinal; raises FrontierError for a negative one."""
        if ordinal < 0:
            raise FrontierError(f"ordinal {ordinal} does not exist: ordinals start at 0")
        if ordinal < self._frontier:
            return OrdinalState.SETTLED
        for state, members in self._members.items():
            if ordinal in members:
                return state
        return OrdinalState.NEW

    def members(self, state: OrdinalState) -> list[int]:
        """The ordinals in `state`, ascending, from the frontier up to next_ordinal."""
        return sorted(self._members.get(state, ()))

    def unfinished(self) -> list[int]:
        """Ordinals that were leased and have not come to their end, ascending."""
        return sorted(ordinal for state in _OPEN for ordinal in self._members[state])

    def counts(self) -> Counts:
        """Totals over the whole run."""
        terminal = self._frontier + sum(
            len(self._members[state]) for state in (OrdinalState.TRAINED, OrdinalState.DROPPED)
        )
        return Counts(
            trained=terminal - sum(self._dropped_totals.values()),
            dropped=dict(self._dropped_totals),
            buffered=len(self._members[OrdinalState.BUFFERED]),
            in_flight=len(self._members[OrdinalState.IN_FLIGHT]),
            returned=len(self._members[OrdinalState.RETURNED]),
        )

    def open_by_target(self) -> dict[int, int]:
        """How many ordinals in flight or buffered are bound to each target step."""
        bound = self._members[OrdinalState.IN_FLIGHT] | self._members[OrdinalState.BUFFERED]
        return Counter(step for ordinal, step in self._target_steps.items() if ordinal in bound)

    def lease(self, count: int) -> list[int]:
        """Put the next `count` ordinals in flight and return them: returned ones first, ascending, then new ones."""
        if count < 0:
            raise FrontierError(f"cannot lease {count} ordinals: the count must not be negative")
        chosen = heapq.nsmallest(count, self._members[OrdinalState.RETURNED])
        chosen += heapq.nsmallest(count - len(chosen), self._members[OrdinalState.NEW])
        chosen += range(self._next_ordinal, self._next_ordinal + count - len(chosen))
        self.leased(chosen)
        return chosen

    def leased(self, ordinals: Iterable[int]) -> None:
        """Observe that exactly these ordinals, new or returned and not necessarily contiguous, were put in flight."""
        named = list(ordinals)
        self._check(named, (OrdinalState.NEW, OrdinalState.RETURNED), OrdinalState.IN_FLIGHT)
        end = max(named, default=-1) + 1
        if end > self._next_ordinal:
            self._members[OrdinalState.NEW].update(range(self._next_ordinal, end))
            self._next_ordinal = end
        self._place(named, OrdinalState.IN_FLIGHT)

    def buffered(self, ordinals: Iterable[int]) -> None:
        """Their groups are durable in the store."""
        self._move(ordinals, (OrdinalState.IN_FLIGHT,), OrdinalState.BUFFERED)

    def returned(self, ordinals: Iterable[int]) -> None:
        """They are to be leased again: expired, failed within their budget, or stale."""
        self._move(ordinals, (OrdinalState.IN_FLIGHT, OrdinalState.BUFFERED), OrdinalState.RETURNED)

    def trained(self, ordinals: Iterable[int], step: int) -> None:
        """Step `step` used their groups. Terminal. Steps never go back: raises FrontierError for an earlier one."""
        if step < self._step:
            raise FrontierError(f"step {step} cannot train after step {self._step}: steps must not decrease")
        self._close(ordinals, (OrdinalState.BUFFERED,), OrdinalState.TRAINED)
        self._step = step

    def dropped(self, ordinals: Iterable[int], reason: str) -> None:
        """They will never be trained, for `reason`. Terminal: not leased again, not even after a resume."""
        if not reason:
            raise FrontierError("a dropped ordinal needs a reason, but the reason given is empty")
        count = self._close(ordinals, _OPEN, OrdinalState.DROPPED)
        if count:
            self._dropped_totals[reason] = self._dropped_totals.get(reason, 0) + count

    def set_failure_count(self, ordinal: int, count: int) -> None:
        """Record how often generating an open ordinal has failed."""
        self._check([ordinal], _OPEN, "given a failure count")
        self._failure_counts[ordinal] = count

    def set_target_step(self, ordinal: int, step: int) -> None:
        """Bind an open ordinal to the step that is to train it."""
        self._check([ordinal], _OPEN, "given a target step")
        self._target_steps[ordinal] = step

    def checkpoint(self) -> FrontierState:
        """A snapshot that shares nothing with this object."""
        return FrontierState(
            cut=self._frontier,
            next_ordinal=self._next_ordinal,
            step=self._step,
            trained_above_cut=self.members(OrdinalState.TRAINED),
            dropped_above_cut=self.members(OrdinalState.DROPPED),
            buffered=self.members(OrdinalState.BUFFERED),
            failure_counts=dict(self._failure_counts),
            target_steps=dict(self._target_steps),
            dropped_totals=dict(self._dropped_totals),
        )

    @classmethod
    def resume(
        cls, state: FrontierState, *, keep_buffered: bool = True, retained: Collection[int] | None = None
    ) -> Frontier:
        """Continue from a checkpoint. Whatever was open and is not kept buffered is returned.

        `retained`: the buffered ordinals that are still admissible; None keeps all. Raises FrontierError if
        `retained` names an ordinal that the checkpoint does not hold buffered.
        """
        held = set(state.buffered)
        strangers = set(retained or ()) - held
        if strangers:
            raise FrontierError(
                f"ordinal {min(strangers)} cannot be retained: the checkpoint with cut {state.cut} does not buffer it"
            )
        kept = (held if retained is None else held.intersection(retained)) if keep_buffered else set()
        frontier = cls()
        frontier._frontier, frontier._next_ordinal, frontier._step = state.cut, state.next_ordinal, state.step
        frontier._members[OrdinalState.TRAINED].update(state.trained_above_cut)
        frontier._members[OrdinalState.DROPPED].update(state.dropped_above_cut)
        frontier._members[OrdinalState.BUFFERED].update(kept)
        frontier._members[OrdinalState.RETURNED].update(
            set(range(state.cut, state.next_ordinal)).difference(state.trained_above_cut, state.dropped_above_cut, kept)
        )
        frontier._failure_counts.update(state.failure_counts)
        frontier._target_steps.update(state.target_steps)
        frontier._dropped_totals.update(state.dropped_totals)
        frontier._settle()
        return frontier

    def _move(self, ordinals: Iterable[int], allowed: tuple[OrdinalState, ...], target: OrdinalState) -> list[int]:
        named = list(ordinals)
        self._check(named, allowed, target)
        self._place(named, target)
        return named

    def _close(self, ordinals: Iterable[int], allowed: tuple[OrdinalState, ...], target: OrdinalState) -> int:
        named = self._move(ordinals, allowed, target)
        for ordinal in named:
            self._failure_counts.pop(ordinal, None)
            self._target_steps.pop(ordinal, None)
        self._settle()
        return len(named)

    def _check(self, ordinals: list[int], allowed: tuple[OrdinalState, ...], becomes: str) -> None:
        seen: set[int] = set()
        for ordinal in ordinals:
            state = self.state(ordinal)
            if state not in allowed:
                raise FrontierError(
                    f"ordinal {ordinal} is {state} and cannot become {becomes}: only {' or '.join(allowed)} can"
                )
            if ordinal in seen:
                raise FrontierError(f"ordinal {ordinal} is named twice in one call that makes it {becomes}")
            seen.add(ordinal)

    def _place(self, ordinals: list[int], target: OrdinalState) -> None:
        for members in self._members.values():
            members.difference_update(ordinals)
        self._members[target].update(ordinals)

    def _settle(self) -> None:
        trained, dropped = self._members[OrdinalState.TRAINED], self._members[OrdinalState.DROPPED]
        while self._frontier in trained or self._frontier in dropped:
            trained.discard(self._frontier)
            dropped.discard(self._frontier)
            self._frontier += 1
