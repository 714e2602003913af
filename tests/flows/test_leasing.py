"""The flow's side of the schedule follows the store and never runs ahead of the window."""

from pathlib import Path

import pytest

from flows.leasing import Leasing
from grpo_core.schedule.window import Window
from storage.leases import read_lease
from storage.ledger import LedgerWriter, Totals, ledger_rows
from storage.objects import ObjectStore
from storage.pool import RefitRecord, write_refit

WINDOW = Window(prompts_per_step=4, max_age=1, every_steps=1, steps=5, stale_policy="mask")


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore.open(str(tmp_path / "run"))


def live(store: ObjectStore, version: int) -> None:
    write_refit(store, RefitRecord(1, version, version, ("engine-0",), {}, {}))


def decide(store: ObjectStore, step: int, *, drops: bool = False, **states: list[int]) -> None:
    """Ledger ordinals by state, as the trainer does."""
    rows = ledger_rows(
        {"ordinal": ordinal, "state": state, "reason": None if state == "trained" else "stale"}
        for state, ordinals in states.items()
        for ordinal in ordinals
    )
    writer = LedgerWriter(store, 1)
    if drops:
        writer.write_drops(step, rows, Totals())
    else:
        writer.write_step(step, rows, Totals(), {})


def lease_all(leasing: Leasing, size: int = 2) -> list[tuple[int, ...]]:
    leases = []
    while (record := leasing.next_lease(size)) is not None:
        leases.append(record.ordinals)
    return leases


def test_nothing_is_leased_before_the_cold_refit(store: ObjectStore) -> None:
    leasing = Leasing(store, 1, WINDOW, None, keep_buffered=True)
    leasing.observe()
    assert lease_all(leasing) == []
    live(store, 0)
    leasing.observe()
    assert lease_all(leasing) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert read_lease(store, 1, 0).stamp == "1.0"


def test_capacity_opens_with_the_refit_and_not_with_the_ledger_alone(store: ObjectStore) -> None:
    leasing = Leasing(store, 1, WINDOW, None, keep_buffered=True)
    live(store, 0)
    leasing.observe()
    lease_all(leasing)
    decide(store, 1, trained=[0, 1, 2, 3])
    leasing.observe()
    assert lease_all(leasing) == []
    live(store, 1)
    leasing.observe()
    assert lease_all(leasing) == [(8, 9), (10, 11)]


def test_drops_free_capacity_before_the_step_happens_and_returned_ordinals_come_first(store: ObjectStore) -> None:
    leasing = Leasing(store, 1, WINDOW, None, keep_buffered=True)
    live(store, 0)
    leasing.observe()
    lease_all(leasing)
    decide(store, 1, drops=True, dropped=[1, 2], returned=[5])
    leasing.observe()
    assert lease_all(leasing) == [(5, 8), (9,)]


def test_the_end_of_the_run_is_not_overshot(store: ObjectStore) -> None:
    leasing = Leasing(store, 1, WINDOW, None, keep_buffered=True)
    leased = 0
    for step in range(6):
        live(store, step)
        leasing.observe()
        leased += sum(map(len, lease_all(leasing)))
        if step < 5:
            decide(store, step + 1, trained=list(range(4 * step, 4 * step + 4)))
    assert leased == 20


def test_a_sealed_lease_gives_its_missing_ordinals_to_the_next(store: ObjectStore) -> None:
    leasing = Leasing(store, 1, WINDOW, None, keep_buffered=True)
    live(store, 0)
    leasing.observe()
    lease_all(leasing)
    leasing.arrived((2,))
    leasing.failed((3,))
    assert lease_all(leasing) == [(3,)]
    assert read_lease(store, 1, 4).failure_counts == {3: 1}
