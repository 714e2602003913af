"""Who is in the pool of engines, and which version of the policy it carries: two logs of small records.

Changes of membership are numbered and written by the flow alone; the trainer reads them before each refit. Refits are
written by the trainer alone, after every engine named in the record carries the version and agreed with the trainer's
own log-probs; a version without a record is not live.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from storage import layout
from storage.errors import DamagedRecord, ObjectMissing
from storage.objects import ObjectStore
from storage.records import encode_record, read_record, write_record


@dataclass(frozen=True, slots=True)
class PoolChange:
    """Engines, by name, that join (with their URL) or leave. A name is never used for two processes."""

    joined: Mapping[str, str] = field(default_factory=dict)
    left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RefitRecord:
    """A version that became live in `engines`. `seconds` per phase; `canary`: largest log-prob difference per engine, nats."""

    attempt: int
    version: int
    step: int
    engines: tuple[str, ...]
    seconds: Mapping[str, float]
    canary: Mapping[str, float]


def write_pool_change(store: ObjectStore, attempt: int, number: int, change: PoolChange) -> None:
    """Raise Fenced when another process wrote this change."""
    write_record(store, layout.pool_change(attempt, number), {"joined": dict(change.joined), "left": list(change.left)})


def read_pool_changes(store: ObjectStore, attempt: int, *, after: int = -1) -> list[PoolChange]:
    """All changes numbered above `after`, in order; they are dense, so a missing number is the end."""
    changes: list[PoolChange] = []
    while True:
        try:
            fields = read_record(store, layout.pool_change(attempt, after + 1 + len(changes)))
        except ObjectMissing:
            return changes
        changes.append(PoolChange(fields["joined"], tuple(fields["left"])))


def write_refit(store: ObjectStore, record: RefitRecord) -> bool:
    """Whether this record is the first of its version; a later one, for an engine that joined late, changes nothing."""
    return store.commit(layout.refit(record.attempt, record.version), encode_record(asdict(record)))


def read_refit(store: ObjectStore, attempt: int, version: int) -> RefitRecord | None:
    """The record of a version, or None while it is not live. Raise DamagedRecord."""
    key = layout.refit(attempt, version)
    try:
        fields = read_record(store, key)
        return RefitRecord(**{**fields, "engines": tuple(fields["engines"])})
    except ObjectMissing:
        return None
    except (TypeError, KeyError) as error:
        raise DamagedRecord(f"Record {key} is not a refit: {error}.") from error
