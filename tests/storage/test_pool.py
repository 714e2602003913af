"""Membership and refits are logs of small records: dense, written once, read back as they were."""

from __future__ import annotations

import pytest

from storage import layout
from storage.errors import DamagedRecord, Fenced
from storage.objects import ObjectStore
from storage.pool import (
    PoolChange,
    PoolWish,
    RefitRecord,
    read_pool_changes,
    read_pool_wishes,
    read_refit,
    wished,
    write_pool_change,
    write_pool_wish,
    write_refit,
)
from storage.records import write_record

RECORD = RefitRecord(2, 5, 5, ("a", "b"), {"pause": 0.1}, {"a": 1e-6, "b": 2e-6})


def test_changes_are_read_in_order_from_any_point(store: ObjectStore) -> None:
    changes = [PoolChange({"a": "http://a"}), PoolChange({"b": "http://b"}, ("a",)), PoolChange(left=("b",))]
    for number, change in enumerate(changes):
        write_pool_change(store, 2, number, change)
    assert read_pool_changes(store, 2) == changes
    assert read_pool_changes(store, 2, after=1) == changes[2:]
    assert read_pool_changes(store, 2, after=2) == read_pool_changes(store, 3) == []


def test_a_gap_in_the_changes_is_their_end(local_store: ObjectStore) -> None:
    write_pool_change(local_store, 1, 0, PoolChange({"a": "http://a"}))
    write_pool_change(local_store, 1, 2, PoolChange(left=("a",)))
    assert len(read_pool_changes(local_store, 1)) == 1


def test_a_change_has_one_writer(local_store: ObjectStore) -> None:
    write_pool_change(local_store, 1, 0, PoolChange({"a": "http://a"}))
    with pytest.raises(Fenced):
        write_pool_change(local_store, 1, 0, PoolChange({"b": "http://b"}))


def test_a_version_is_live_once_its_first_record_is_there(store: ObjectStore) -> None:
    assert read_refit(store, 2, 5) is None
    assert write_refit(store, RECORD)
    later = RefitRecord(2, 5, 5, ("late",), {}, {})
    latest = RefitRecord(2, 5, 5, ("later still",), {}, {}, bytes=7)
    assert [write_refit(store, later), write_refit(store, latest)] == [False, False]
    assert [read_refit(store, 2, 5, number) for number in range(4)] == [RECORD, later, latest, None]
    assert read_refit(store, 2, 6) is None


def test_wishes_of_several_people_are_all_kept_in_order(store: ObjectStore) -> None:
    first, second = PoolWish(add=("http://a:1", "http://b:1")), PoolWish(remove=("http://a:1",))
    assert [write_pool_wish(store, first), write_pool_wish(store, second)] == [0, 1]
    assert read_pool_wishes(store) == [first, second]
    assert read_pool_wishes(store, after=0) == [second]
    assert wished([first, second]) == {"http://a:1": False, "http://b:1": True}
    assert wished([second, first])["http://a:1"]


def test_a_record_that_is_no_refit_is_called_damaged(local_store: ObjectStore) -> None:
    write_record(local_store, layout.refit(1, 1), {"version": 1})
    with pytest.raises(DamagedRecord, match="not a refit"):
        read_refit(local_store, 1, 1)
