"""Leases: numbered, durable sets of ordinals, each handed to one generation task.

The flow writes the record of a lease before it dispatches it, so the trainer learns from the records alone what is in
flight, and a restarted flow forgets nothing: retry counts and target steps live here. Numbers count from 0 in each
attempt, without gaps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from storage import layout
from storage.errors import DamagedRecord, ObjectMissing
from storage.objects import ObjectStore
from storage.records import read_record, write_record


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """`stamp` is the newest `attempt.version` at dispatch; `dispatched_at` is in Unix seconds."""

    attempt: int
    lease: int
    ordinals: tuple[int, ...]
    dispatched_at: float
    stamp: str
    target_step: int | None = None
    failure_counts: Mapping[int, int] = field(default_factory=dict)


def write_lease(store: ObjectStore, record: LeaseRecord) -> None:
    """Raise Fenced when another process wrote this lease."""
    fields = {
        "attempt": record.attempt,
        "lease": record.lease,
        "ordinals": list(record.ordinals),
        "dispatched_at": record.dispatched_at,
        "stamp": record.stamp,
        "target_step": record.target_step,
        "failure_counts": {str(ordinal): count for ordinal, count in sorted(record.failure_counts.items())},
    }
    write_record(store, layout.lease(record.attempt, record.lease), fields)


def read_lease(store: ObjectStore, attempt: int, lease: int) -> LeaseRecord:
    """Raise ObjectMissing or DamagedRecord."""
    key = layout.lease(attempt, lease)
    fields = read_record(store, key)
    try:
        fields["ordinals"] = tuple(fields["ordinals"])
        fields["failure_counts"] = {int(ordinal): count for ordinal, count in fields["failure_counts"].items()}
        return LeaseRecord(**fields)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedRecord(f"Record {key} is not a lease: {type(error).__name__} {error}.") from error


def newest_leases(store: ObjectStore, attempt: int) -> Iterator[int]:
    """The numbers of the attempt's leases, descending; older directories are listed only when they are needed."""
    for directory in reversed(store.directories(layout.leases_prefix(attempt))):
        names = (layout.parse_lease(key) for key in store.list(directory))
        yield from sorted((name.lease for name in names if name is not None), reverse=True)


def list_leases(store: ObjectStore, attempt: int, *, after: int = -1) -> list[LeaseRecord]:
    """The records of all leases numbered above `after`, ascending; they are dense, so a missing number is the end.

    Lists nothing: where there is no new lease, this is one request.
    """
    records: list[LeaseRecord] = []
    while True:
        try:
            records.append(read_lease(store, attempt, after + 1 + len(records)))
        except ObjectMissing:
            return records
