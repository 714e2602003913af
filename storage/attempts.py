"""Attempts: the lives of a run's trainer, the fence between them, and the living history they form.

Every trainer start claims the next number, densely and for ever, so "is there a newer attempt than n" is the question
"does claim n + 1 exist". A claim names its parent: the checkpoint (attempt, step) that it verified and resumed from,
or none when it started from the initial weights. Following parents from the newest attempt gives the living chain;
whatever an older attempt wrote after the step its child resumed from is a dead branch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from storage import layout
from storage.errors import DamagedRecord, Fenced
from storage.objects import ObjectStore
from storage.records import decode_record, encode_record


@dataclass(frozen=True, slots=True)
class AttemptClaim:
    """`pid_started_at` tells the claiming process from a later one that reused its pid; times are Unix seconds."""

    attempt: int
    parent: tuple[int, int] | None
    host: str
    pid: int
    pid_started_at: float
    claimed_at: float
    config_changes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Link:
    """The steps of `attempt` up to and including `last_step` (None: all of them) belong to the living history."""

    attempt: int
    last_step: int | None

    def contains(self, attempt: int, step: int) -> bool:
        return attempt == self.attempt and (self.last_step is None or step <= self.last_step)


@dataclass(frozen=True, slots=True)
class Fence:
    """Held by one attempt; called before it writes anything that decides."""

    store: ObjectStore
    attempt: int

    def check(self) -> None:
        """Raise Fenced when a newer attempt has been claimed."""
        if self.store.exists(layout.attempt(self.attempt + 1)):
            raise Fenced(f"Attempt {self.attempt} of {self.store.url} is fenced: a newer attempt owns the run; stop.")


def claim_next(
    store: ObjectStore,
    *,
    parent: tuple[int, int] | None,
    host: str,
    pid: int,
    pid_started_at: float,
    claimed_at: float,
    config_changes: Mapping[str, Any] | None = None,
    after: int | None = None,
) -> AttemptClaim:
    """Claim the lowest free attempt number (the first is 1), fencing every older attempt.

    `after` is the newest attempt the caller knows of: Fenced if there is a newer one, which it would fence unseen.
    """
    number = (max(attempt_numbers(store), default=0) if after is None else after) + 1
    while True:
        claim = AttemptClaim(number, parent, host, pid, pid_started_at, claimed_at, dict(config_changes or {}))
        _check_parent(claim)
        if store.commit(layout.attempt(number), encode_record(_fields(claim))):
            return claim
        if after is not None:
            raise Fenced(f"Attempt {number} of {store.url} was claimed by another process: it owns the run; stop.")
        number += 1


def attempt_numbers(store: ObjectStore) -> list[int]:
    numbers = (layout.parse_attempt(key) for key in store.list(layout.attempts_prefix()))
    return sorted(number for number in numbers if number is not None)


def read_attempt(store: ObjectStore, attempt: int) -> AttemptClaim:
    """Raise ObjectMissing or DamagedRecord."""
    key = layout.attempt(attempt)
    fields = decode_record(store.get(key), key)
    try:
        fields["parent"] = None if fields["parent"] is None else (fields["parent"][0], fields["parent"][1])
        claim = AttemptClaim(**fields)
    except (KeyError, TypeError, IndexError) as error:
        raise DamagedRecord(f"Record {key} is not the claim of an attempt: {error}.") from error
    _check_parent(claim)
    return claim


def newest(store: ObjectStore) -> AttemptClaim | None:
    numbers = attempt_numbers(store)
    return read_attempt(store, numbers[-1]) if numbers else None


def living_chain(store: ObjectStore) -> list[Link]:
    """The living history, oldest attempt first. Empty for a run that never started."""
    return chain_of(store, newest(store))


def chain_of(store: ObjectStore, claim: AttemptClaim | None) -> list[Link]:
    """The history that an attempt continued and made, oldest attempt first."""
    links = []
    last_step = None
    while claim is not None:
        links.append(Link(claim.attempt, last_step))
        if claim.parent is None:
            break
        last_step = claim.parent[1]
        claim = read_attempt(store, claim.parent[0])
    return links[::-1]


def _check_parent(claim: AttemptClaim) -> None:
    if claim.parent is not None and not 0 < claim.parent[0] < claim.attempt:
        raise DamagedRecord(f"Attempt {claim.attempt} names attempt {claim.parent[0]} as its parent: it must be older.")


def _fields(claim: AttemptClaim) -> dict[str, Any]:
    return {
        "attempt": claim.attempt,
        "parent": None if claim.parent is None else list(claim.parent),
        "host": claim.host,
        "pid": claim.pid,
        "pid_started_at": claim.pid_started_at,
        "claimed_at": claim.claimed_at,
        "config_changes": dict(claim.config_changes),
    }
