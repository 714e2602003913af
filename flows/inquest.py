"""What the attempts that died since the checkpoint can tell about the ordinals that will be leased again.

Failures are counted in lease records, so a restart finds them there; a checkpoint knows only those of its own time. And
whatever was in flight when the flow itself died, several times in a row, is suspected of having killed it.

Contract: only reads; looks at the newest leases of the newest attempts, so the cost does not grow with the run. An
attempt that ended in good order, or whose flow went on to the next one, is no death.
"""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from grpo_core.schedule.suspects import Suspects, judge
from storage import layout
from storage.attempts import AttemptClaim, read_attempt
from storage.errors import ObjectMissing
from storage.layout import PartName
from storage.leases import LeaseRecord, newest_leases, read_lease
from storage.objects import PARALLEL_REQUESTS, ObjectStore
from storage.trajectories import PartFooter, TrajectoryStore

# Twice as many as can be open at once.
LEASES = 400
# Attempts that are looked at, at most; those that died before a lease count for nothing.
LOOK_BACK = 20


@dataclass(frozen=True, slots=True)
class Inquest:
    """Failures per ordinal, and whom to suspect."""

    failure_counts: Mapping[int, int] = field(default_factory=dict)
    suspects: Suspects = field(default_factory=Suspects)


@dataclass(frozen=True, slots=True)
class Remains:
    """What one attempt left behind: failures per ordinal, and the ordinals that were in flight to its end."""

    failure_counts: dict[int, int]
    in_flight: frozenset[int]
    leased: bool


def hold_inquest(store: ObjectStore, newest: int, *, lives: int, leasable: Callable[[int], bool]) -> Inquest:
    """Look at the attempts up to `newest`, before the next one begins. An ordinal that has cost `lives` lives of the
    flow, alone at the last, counts as having failed that often. `leasable`: whether an ordinal is to be leased again;
    others came to something, even if nothing is left of their lease. An attempt that died before its first lease tells
    nothing about anybody."""
    claims = [read_attempt(store, number) for number in range(newest, max(0, newest - LOOK_BACK), -1)]
    failures: dict[int, int] = {}
    deaths: list[frozenset[int]] = []
    in_a_row = True
    for later, claim in zip([None, *claims], claims, strict=False):
        if len(deaths) >= max(lives, 2):
            break
        remains = _remains(store, claim.attempt)
        for ordinal, count in remains.failure_counts.items():
            failures[ordinal] = max(count, failures.get(ordinal, 0))
        in_a_row = in_a_row and _died(store, claim, later)
        if in_a_row and remains.leased:
            deaths.append(frozenset(ordinal for ordinal in remains.in_flight if leasable(ordinal)))
    verdict = judge(deaths, lives=lives)
    return Inquest(failures | dict.fromkeys(verdict.culprits, lives), verdict.suspects)


def _died(store: ObjectStore, claim: AttemptClaim, later: AttemptClaim | None) -> bool:
    """Whether the flow of this attempt ended without a word."""
    if later is not None and (claim.host, claim.pid, claim.pid_started_at) == (
        later.host,
        later.pid,
        later.pid_started_at,
    ):
        return False
    try:
        return not json.loads(store.get(layout.progress(claim.attempt, "flow"))).get("ended", False)
    except ObjectMissing:
        return True


def _remains(store: ObjectStore, attempt: int) -> Remains:
    trajectories = TrajectoryStore(store, attempt)
    with ThreadPoolExecutor(PARALLEL_REQUESTS) as readers:
        newest = islice(newest_leases(store, attempt), LEASES)
        records = list(readers.map(lambda number: read_lease(store, attempt, number), newest))
        parts = trajectories.open_parts(record.lease for record in records)
        footers = [footer for footer in readers.map(partial(_footer, trajectories), parts) if footer is not None]
    return remains_of(records, footers)


def _footer(trajectories: TrajectoryStore, part: PartName) -> PartFooter | None:
    """None for a part that was collected between listing and reading: its ordinals had come to something."""
    try:
        return trajectories.read_footer(part)
    except ObjectMissing:
        return None


def remains_of(records: list[LeaseRecord], footers: list[PartFooter]) -> Remains:
    """Pure. `records` and the `footers` of their parts, in any order."""
    failures: dict[int, int] = {}
    for record in records:
        for ordinal, count in record.failure_counts.items():
            failures[ordinal] = max(count, failures.get(ordinal, 0))
    settled: dict[int, set[int]] = {}
    for footer in footers:
        settled.setdefault(footer.name.lease, set()).update(footer.settled)
    open_ordinals = (set(record.ordinals) - settled.get(record.lease, set()) for record in records)
    return Remains(failures, frozenset().union(*open_ordinals), leased=bool(records))
