import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pandas
import polars
import pyarrow as pa
import pytest

from storage import layout, schema
from storage.attempts import Fence, claim_next
from storage.errors import DamagedShard, Fenced, ObjectMissing
from storage.layout import PartName
from storage.leases import LeaseRecord, list_leases, newest_leases, read_lease, write_lease
from storage.objects import ObjectStore
from storage.trajectories import TrajectoryStore

MakeTable = Callable[..., pa.Table]


def ordinals_of(table: pa.Table) -> list[int]:
    return sorted(set(table["ordinal"].to_pylist()))


def test_a_part_is_committed_once(store: ObjectStore, shard_table: MakeTable) -> None:
    trajectories = TrajectoryStore(store, 1)
    assert trajectories.write_part(7, 0, shard_table(1))
    assert not trajectories.write_part(7, 0, shard_table(2))
    table = trajectories.read(trajectories.open_parts([7]))
    assert ordinals_of(table) == [1]
    assert set(zip(*(table[name].to_pylist() for name in ("attempt", "lease", "part")), strict=True)) == {(1, 7, 0)}


def test_open_parts_lists_only_the_leases_asked_for(store: ObjectStore, shard_table: MakeTable) -> None:
    trajectories = TrajectoryStore(store, 1)
    for lease in (1, 12, 13, 1000):
        trajectories.append(lease, shard_table(lease))
    TrajectoryStore(store, 2).append(12, shard_table(99))
    assert trajectories.open_parts([12, 1, 1000]) == [PartName(1, 1, 0), PartName(1, 12, 0), PartName(1, 1000, 0)]
    assert trajectories.open_parts([5]) == []
    assert trajectories.open_parts([]) == []


def test_parts_of_a_lease_are_dense_and_end_with_the_last(store: ObjectStore, shard_table: MakeTable) -> None:
    trajectories = TrajectoryStore(store, 1, metadata={"code_version": "abc"})
    assert trajectories.append(3, shard_table(1)) == PartName(1, 3, 0)
    assert trajectories.append(3, shard_table(2, 5), last=True, returned=[4]) == PartName(1, 3, 1)
    assert trajectories.append(3, shard_table(4)) is None
    footer = trajectories.read_footer(PartName(1, 3, 1))
    assert (footer.last, footer.ordinals, footer.returned) == (True, (2, 5), (4,))
    assert footer.metadata["code_version"] == "abc"
    assert not trajectories.read_footer(PartName(1, 3, 0)).last


def test_a_lost_answer_is_no_second_part(local_store: ObjectStore, shard_table: MakeTable, monkeypatch: Any) -> None:
    create = ObjectStore.put_if_absent
    monkeypatch.setattr(ObjectStore, "put_if_absent", lambda *arguments: create(*arguments) and False)
    trajectories = TrajectoryStore(local_store, 1)
    assert trajectories.append(0, shard_table(1)) == PartName(1, 0, 0)
    assert trajectories.append(0, shard_table(1)) is None
    assert trajectories.open_parts([0]) == [PartName(1, 0, 0)]


def test_a_retry_of_a_finished_part_writes_nothing_again(store: ObjectStore, shard_table: MakeTable) -> None:
    trajectories = TrajectoryStore(store, 1)
    trajectories.append(0, shard_table(1, 2))
    assert trajectories.append(0, shard_table(2, 3)) == PartName(1, 0, 1)
    assert trajectories.read_footer(PartName(1, 0, 1)).ordinals == (3,)
    assert trajectories.append(0, shard_table(1, 2, 3)) is None


def test_twins_of_one_lease_complete_each_other(store: ObjectStore, shard_table: MakeTable) -> None:
    ordinals = list(range(8))
    errors: list[BaseException] = []

    def twin(order: list[int]) -> None:
        try:
            trajectories = TrajectoryStore(store, 1)
            for position, ordinal in enumerate(order):
                trajectories.append(0, shard_table(ordinal), last=position == len(order) - 1)
        except BaseException as error:
            errors.append(error)
            raise

    twins = [
        threading.Thread(target=twin, args=(order,))
        for order in (ordinals, ordinals[::-1], ordinals[::2] + ordinals[1::2])
    ]
    for thread in twins:
        thread.start()
    for thread in twins:
        thread.join(timeout=60)
    assert not errors
    trajectories = TrajectoryStore(store, 1)
    parts = trajectories.open_parts([0])
    footers = [trajectories.read_footer(part) for part in parts]
    assert [part.part for part in parts] == list(range(len(parts)))
    assert sorted(ordinal for footer in footers for ordinal in footer.ordinals) == ordinals
    assert [footer.last for footer in footers].count(True) == 1 and footers[-1].last
    assert trajectories.read(parts).num_rows == 2 * len(ordinals)


def test_a_slow_writer_finds_its_lease_sealed(store: ObjectStore, shard_table: MakeTable) -> None:
    task, flow = TrajectoryStore(store, 1), TrajectoryStore(store, 1)
    task.append(0, shard_table(10))
    sealed = flow.seal(0, [10, 11, 12])
    assert sealed.returned == (11, 12)
    assert task.append(0, shard_table(11)) is None
    assert task.append(0, shard_table(12), last=True) is None
    assert ordinals_of(task.read(task.open_parts([0]))) == [10]
    assert flow.seal(0, [10, 11, 12]) == sealed


def test_a_writer_that_wins_while_the_flow_seals_keeps_its_group(
    local_store: ObjectStore, shard_table: MakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, flow = TrajectoryStore(local_store, 1), TrajectoryStore(local_store, 1)
    listing = flow.open_parts

    def list_then_lose(leases: list[int]) -> list[PartName]:
        found = listing(leases)
        task.append(0, shard_table(11))
        return found

    monkeypatch.setattr(flow, "open_parts", list_then_lose)
    sealed = flow.seal(0, [10, 11, 12])
    assert sealed.returned == (10, 12)
    assert sealed.name == PartName(1, 0, 1)


def test_sealing_a_finished_lease_returns_what_its_task_returned(store: ObjectStore, shard_table: MakeTable) -> None:
    trajectories = TrajectoryStore(store, 1)
    trajectories.append(0, shard_table(1), last=True, returned=[2])
    assert trajectories.seal(0, [1, 2]).returned == (2,)


def test_the_lowest_part_wins_for_an_ordinal_of_one_lease(local_store: ObjectStore, shard_table: MakeTable) -> None:
    trajectories = TrajectoryStore(local_store, 1)
    trajectories.write_part(0, 0, shard_table(1, reward=1.0))
    trajectories.write_part(0, 1, shard_table(1, 2, reward=2.0))
    trajectories.write_part(5, 0, shard_table(1, reward=5.0))
    table = trajectories.read(reversed(trajectories.open_parts([0, 5])), ["reward"])
    assert table.column_names == ["reward"]
    assert table["reward"].to_pylist() == [1.0, 1.0, 2.0, 2.0, 5.0, 5.0]


def test_reading_no_parts_gives_an_empty_table(local_store: ObjectStore) -> None:
    trajectories = TrajectoryStore(local_store, 1)
    assert trajectories.read([]).schema == schema.SHARD
    assert trajectories.read([], ["reward"]).column_names == ["reward"]


def test_a_fenced_attempt_writes_no_part(store: ObjectStore, shard_table: MakeTable) -> None:
    owner: dict[str, Any] = {"host": "h", "pid": 1, "pid_started_at": 0.0, "claimed_at": 0.0}
    first = claim_next(store, parent=None, **owner)
    trajectories = TrajectoryStore(store, first.attempt, fence=Fence(store, first.attempt).check)
    assert trajectories.append(0, shard_table(1)) is not None
    claim_next(store, parent=None, **owner)
    with pytest.raises(Fenced):
        trajectories.append(0, shard_table(2))
    with pytest.raises(Fenced):
        trajectories.seal(0, [1, 2])
    assert trajectories.open_parts([0]) == [PartName(1, 0, 0)]


def test_a_damaged_part_is_named(local_store: ObjectStore, shard_table: MakeTable) -> None:
    trajectories = TrajectoryStore(local_store, 1)
    trajectories.append(0, shard_table(1))
    key = layout.part(1, 0, 0)
    data = local_store.get(key)
    local_store.put(key, data[: len(data) // 2])
    for read in (lambda: trajectories.read([PartName(1, 0, 0)]), lambda: trajectories.read_footer(PartName(1, 0, 0))):
        with pytest.raises(DamagedShard, match="lease-000000000.part-000"):
            read()


def test_a_part_under_a_wrong_name_is_refused(local_store: ObjectStore, shard_table: MakeTable) -> None:
    trajectories = TrajectoryStore(local_store, 1)
    trajectories.append(0, shard_table(1))
    local_store.put(layout.part(1, 9, 0), local_store.get(layout.part(1, 0, 0)))
    with pytest.raises(DamagedShard, match="moved or copied"):
        trajectories.read([PartName(1, 9, 0)])


def test_a_footer_larger_than_the_first_read_is_found(local_store: ObjectStore, shard_table: MakeTable) -> None:
    trajectories = TrajectoryStore(local_store, 1, metadata={"note": "x" * 200_000})
    trajectories.append(0, shard_table(1))
    assert trajectories.read_footer(PartName(1, 0, 0)).ordinals == (1,)


def test_users_read_shards_without_our_code(local_store: ObjectStore, shard_table: MakeTable) -> None:
    trajectories = TrajectoryStore(local_store, 1)
    trajectories.append(0, shard_table(1, 2))
    trajectories.append(0, shard_table(3), last=True)
    trajectories.append(1, schema.SHARD.empty_table(), last=True)
    root = local_store.local_path(layout.trajectories_prefix())
    assert isinstance(root, Path)
    pattern = str(root / "**" / "*.parquet")
    query = f"SELECT count(*), sum(len(token_ids)), max(version_spans[1].version), sum(logprobs[3]) FROM '{pattern}'"
    assert duckdb.connect().execute(query).fetchall() == [(6, 24, 3, -3.0)]
    frame = polars.read_parquet(pattern)
    assert frame["ordinal"].to_list() == [1, 1, 2, 2, 3, 3]
    assert frame["token_ids"].to_list()[0] == [1, 5, 150_000, 7]
    tables = pandas.concat(pandas.read_parquet(path) for path in sorted(root.rglob("*.parquet")))
    assert tables["reward"].tolist() == [0.5] * 6


def test_leases_survive_and_are_found_by_number(store: ObjectStore) -> None:
    record = LeaseRecord(1, 999, (4, 5), 12.5, "1.3", target_step=7, failure_counts={4: 2})
    others = [LeaseRecord(1, number, (number,), 13.0, "1.3") for number in (1000, 1001)]
    for each in (record, *others):
        write_lease(store, each)
    assert read_lease(store, 1, 999) == record
    assert list(newest_leases(store, 1)) == [1001, 1000, 999] and not list(newest_leases(store, 2))
    assert list_leases(store, 1, after=999) == others
    assert list_leases(store, 1, after=1001) == list_leases(store, 1) == []
    assert list_leases(store, 2) == []


def test_a_lease_has_one_writer(store: ObjectStore) -> None:
    write_lease(store, LeaseRecord(1, 0, (1,), 0.0, "1.0"))
    with pytest.raises(Fenced, match="lease-000000000"):
        write_lease(store, LeaseRecord(1, 0, (2,), 0.0, "1.0"))
    with pytest.raises(ObjectMissing):
        read_lease(store, 1, 1)
