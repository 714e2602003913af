"""What dead attempts knew is not forgotten, and only deaths count as deaths."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from flows.inquest import hold_inquest
from storage import layout, schema
from storage.attempts import claim_next
from storage.leases import LeaseRecord, write_lease
from storage.objects import ObjectStore
from storage.trajectories import TrajectoryStore


def anything(ordinal: int) -> bool:
    return True


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore.open(str(tmp_path / "run"))


def attempt(store: ObjectStore, pid: int, *leases: tuple[int, ...], failures: dict[int, int] | None = None) -> int:
    """A flow of process `pid` that claimed the next attempt and dispatched these leases."""
    claim = claim_next(store, parent=None, host="here", pid=pid, pid_started_at=1.0, claimed_at=0.0)
    for number, ordinals in enumerate(leases):
        counts = {ordinal: count for ordinal, count in (failures or {}).items() if ordinal in ordinals}
        write_lease(
            store, LeaseRecord(claim.attempt, number, ordinals, 0.0, f"{claim.attempt}.0", failure_counts=counts)
        )
    return claim.attempt


def seal(store: ObjectStore, attempt: int, lease: int, ordinals: tuple[int, ...]) -> None:
    TrajectoryStore(store, attempt).seal(lease, ordinals)


def end_in_order(store: ObjectStore, attempt: int) -> None:
    store.put(layout.progress(attempt, "flow"), json.dumps({"at": 0, "ended": True}).encode())


def test_a_first_attempt_has_nothing_to_look_at(store: ObjectStore) -> None:
    inquest = hold_inquest(store, 0, lives=3, leasable=anything)
    assert not inquest.failure_counts and not inquest.suspects.ordinals


def test_failures_that_no_checkpoint_knows_are_found_in_the_leases(store: ObjectStore) -> None:
    attempt(store, 1, (0, 1), (2, 3), failures={1: 1})
    attempt(store, 2, (0, 1), failures={1: 2})
    assert hold_inquest(store, 2, lives=3, leasable=anything).failure_counts == {1: 2}


def test_what_had_come_back_before_the_death_is_not_suspected(store: ObjectStore) -> None:
    for pid in (1, 2):
        number = attempt(store, pid, (0, 1), (2, 3), (4, 5))
        seal(store, number, 1, (2, 3))
    assert hold_inquest(store, 2, lives=3, leasable=anything).suspects.ordinals == {0, 1, 4, 5}


def test_a_part_that_arrived_clears_its_ordinals(store: ObjectStore) -> None:
    for pid in (1, 2):
        number = attempt(store, pid, (0, 1))
        row = {name: _blank(field) for name, field in zip(schema.SHARD.names, schema.SHARD, strict=True)}
        table = pa.Table.from_pylist([row | {"ordinal": 0}], schema=schema.SHARD)
        assert TrajectoryStore(store, number).write_part(0, 0, table)
    assert hold_inquest(store, 2, lives=3, leasable=anything).suspects.ordinals == {1}


def _blank(field: pa.Field) -> object:
    if field.nullable:
        return None
    if pa.types.is_list(field.type):
        return []
    return "" if pa.types.is_string(field.type) else 0


def test_an_attempt_that_ended_in_order_is_no_death(store: ObjectStore) -> None:
    for pid in (1, 2):
        end_in_order(store, attempt(store, pid, (0, 1)))
    assert not hold_inquest(store, 2, lives=3, leasable=anything).suspects.ordinals


def test_a_trainer_that_died_under_a_living_flow_is_no_death_of_the_flow(store: ObjectStore) -> None:
    attempt(store, 1, (0, 1))
    attempt(store, 1, (0, 1))
    assert not hold_inquest(store, 2, lives=3, leasable=anything).suspects.ordinals


def test_a_prompt_that_was_alone_at_the_last_of_its_deaths_has_used_up_its_attempts(store: ObjectStore) -> None:
    attempt(store, 1, (0, 1), (2,))
    attempt(store, 2, (0, 1), (2,))
    attempt(store, 3, (2,))
    inquest = hold_inquest(store, 3, lives=3, leasable=anything)
    assert inquest.failure_counts == {2: 3}
    assert not inquest.suspects.ordinals


def test_only_the_newest_leases_are_read(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.inquest.LEASES", 2)
    for pid in (1, 2):
        attempt(store, pid, (0,), (1,), (2,))
    assert hold_inquest(store, 2, lives=3, leasable=anything).suspects.ordinals == {1, 2}


def test_what_came_to_something_is_not_suspected_even_when_its_parts_were_collected(store: ObjectStore) -> None:
    for pid in (1, 2):
        attempt(store, pid, (0, 1))
    assert hold_inquest(store, 2, lives=3, leasable=lambda ordinal: ordinal > 0).suspects.ordinals == {1}


def test_a_death_before_any_lease_neither_clears_nor_accuses(store: ObjectStore) -> None:
    attempt(store, 1, (0, 1))
    attempt(store, 2, (0, 1))
    attempt(store, 3)
    assert hold_inquest(store, 3, lives=3, leasable=anything).suspects.ordinals == {0, 1}


def test_with_a_budget_of_one_two_deaths_are_looked_at(store: ObjectStore) -> None:
    attempt(store, 1, (7,))
    attempt(store, 2, (7,))
    assert hold_inquest(store, 2, lives=1, leasable=anything).failure_counts == {7: 1}
