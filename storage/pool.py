"""Who is in the pool of engines, and which version of the policy it carries: logs of small records.

Changes of membership are numbered and written by the flow alone; the trainer reads them before each refit. Refits are
written by the trainer alone, after every engine named in the record carries the version and agreed with the trainer's
own log-probs; a version without a record is not live, and an engine that no record of the version names does not carry
it. Wishes to add or remove engines in mid-run come from anybody, take the next free number, and are read by the flow.
All three are dense: a missing number is the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
class PoolWish:
    """Engines, by URL, that a person wants in the pool or out of it."""

    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RefitRecord:
    """A version that became live in `engines`. `seconds` per phase; `canary`: largest log-prob difference per engine,
    nats; `bytes`: what each engine received."""

    attempt: int
    version: int
    step: int
    engines: tuple[str, ...]
    seconds: Mapping[str, float]
    canary: Mapping[str, float]
    bytes: int = 0


def write_pool_change(store: ObjectStore, attempt: int, number: int, change: PoolChange) -> None:
    """Raise Fenced when another process wrote this change."""
    write_record(store, layout.pool_change(attempt, number), {"joined": dict(change.joined), "left": list(change.left)})


def read_pool_changes(store: ObjectStore, attempt: int, *, after: int = -1) -> list[PoolChange]:
    """All changes numbered above `after`, in order."""
    changes: list[PoolChange] = []
    while True:
        try:
            fields = read_record(store, layout.pool_change(attempt, after + 1 + len(changes)))
        except ObjectMissing:
            return changes
        changes.append(PoolChange(fields["joined"], tuple(fields["left"])))


def write_pool_wish(store: ObjectStore, wish: PoolWish) -> int:
    """Append a wish; the number it got."""
    number, record = 0, encode_record({"add": list(wish.add), "remove": list(wish.remove)})
    while not store.commit(layout.pool_wish(number), record):
        number += 1
    return number


def read_pool_wishes(store: ObjectStore, *, after: int = -1) -> list[PoolWish]:
    """All wishes numbered above `after`, in order."""
    wishes: list[PoolWish] = []
    while True:
        try:
            fields = read_record(store, layout.pool_wish(after + 1 + len(wishes)))
        except ObjectMissing:
            return wishes
        wishes.append(PoolWish(tuple(fields["add"]), tuple(fields["remove"])))


def wished(wishes: Iterable[PoolWish]) -> dict[str, bool]:
    """The last word about each URL: whether it is wanted."""
    last: dict[str, bool] = {}
    for wish in wishes:
        last |= dict.fromkeys(wish.add, True) | dict.fromkeys(wish.remove, False)
    return last


def write_refit(store: ObjectStore, record: RefitRecord) -> bool:
    """Append to the records of a version; whether this one made it live."""
    number, encoded = 0, encode_record(asdict(record))
    while not store.commit(layout.refit(record.attempt, record.version, number), encoded):
        number += 1
    return number == 0


def read_refit(store: ObjectStore, attempt: int, version: int, number: int = 0) -> RefitRecord | None:
    """Record `number` of a version: the one that made it live, or one of engines that joined late. None while it is not
    there. Raise DamagedRecord."""
    key = layout.refit(attempt, version, number)
    try:
        fields = read_record(store, key)
        return RefitRecord(**{**fields, "engines": tuple(fields["engines"])})
    except ObjectMissing:
        return None
    except (TypeError, KeyError) as error:
        raise DamagedRecord(f"Record {key} is not a refit: {error}.") from error
