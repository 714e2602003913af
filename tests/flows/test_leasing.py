"""The flow's side of the schedule follows the store and never runs ahead of the window."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.inquest import Inquest
from flows.leasing import Leasing
from grpo_core.prompts import PromptStream, Row
from grpo_core.schedule.frontier import Frontier, FrontierState
from grpo_core.schedule.suspects import Suspects
from grpo_core.schedule.window import Window
from storage.checkpoints import Manifest
from storage.leases import read_lease
from storage.ledger import LedgerWriter, Totals, ledger_rows
from storage.objects import ObjectStore
from storage.pool import RefitRecord, write_refit

WINDOW = Window(prompts_per_step=4, max_age=1, every_steps=1, steps=5)
PROMPTS = PromptStream([Row([], {})], seed=0)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore.open(str(tmp_path / "run"))


def live(store: ObjectStore, version: int) -> None:
    write_refit(store, RefitRecord(1, version, version, ("engine-0",), {}, {}))


def decide(
    store: ObjectStore, step: int, *, drops: bool = False, ready: int | None = None, **states: list[int]
) -> None:
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
        writer.write_step(step, rows, Totals(), {} if ready is None else {"ready_groups": float(ready)})


def lease_all(leasing: Leasing, size: int = 2) -> list[tuple[int, ...]]:
    leases = []
    while (record := leasing.next_lease(size)) is not None:
        leases.append(record.ordinals)
    return leases


def test_nothing_is_leased_before_the_cold_refit(store: ObjectStore) -> None:
    leasing = Leasing(store, 1, WINDOW, PROMPTS, None, keep_buffered=True)
    leasing.observe()
    assert lease_all(leasing) == []
    live(store, 0)
    leasing.observe()
    assert leasing.next_lease(2) is not None and not leasing.window_full
    assert lease_all(leasing) == [(2, 3), (4, 5), (6, 7)] and leasing.window_full
    assert read_lease(store, 1, 0).stamp == "1.0"


def test_capacity_opens_with_the_refit_and_not_with_the_ledger_alone(store: ObjectStore) -> None:
    leasing = Leasing(store, 1, WINDOW, PROMPTS, None, keep_buffered=True)
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
    leasing = Leasing(store, 1, WINDOW, PROMPTS, None, keep_buffered=True)
    live(store, 0)
    leasing.observe()
    lease_all(leasing)
    decide(store, 1, drops=True, dropped=[1, 2], returned=[5])
    leasing.observe()
    assert lease_all(leasing) == [(5, 8), (9,)]


def test_the_end_of_the_run_is_not_overshot(store: ObjectStore) -> None:
    leasing = Leasing(store, 1, WINDOW, PROMPTS, None, keep_buffered=True)
    leased = 0
    for step in range(6):
        live(store, step)
        leasing.observe()
        leased += sum(map(len, lease_all(leasing)))
        if step < 5:
            decide(store, step + 1, trained=list(range(4 * step, 4 * step + 4)))
    assert leased == 20


def test_a_sealed_lease_gives_its_missing_ordinals_to_the_next(store: ObjectStore) -> None:
    leasing = Leasing(store, 1, WINDOW, PROMPTS, None, keep_buffered=True)
    live(store, 0)
    leasing.observe()
    lease_all(leasing)
    leasing.arrived(1, (2,))
    leasing.gave_back(1, (3,), failed=True)
    assert lease_all(leasing) == [(3,)]
    assert read_lease(store, 1, 4).failure_counts == {3: 1}


def checkpoint(step: int, frontier: Frontier) -> Manifest:
    return Manifest(1, step, step, {}, frontier.checkpoint().to_json(), 0.0)


def test_a_group_that_could_not_be_tried_has_not_failed(store: ObjectStore) -> None:
    leasing = Leasing(store, 1, WINDOW, PROMPTS, None, keep_buffered=True)
    live(store, 0)
    leasing.observe()
    lease_all(leasing)
    leasing.gave_back(1, (2, 3), failed=False)
    assert lease_all(leasing) == [(2, 3)]
    assert read_lease(store, 1, 4).failure_counts == {}


def test_drops_that_appear_together_with_their_step_are_not_passed_over(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer writes drops and then the step while the flow looks for them, one after the other."""
    leasing = Leasing(store, 1, WINDOW, PROMPTS, None, keep_buffered=True)
    live(store, 0)
    leasing.observe()
    lease_all(leasing)
    exists, looked = store.exists, []

    def meanwhile(key: str) -> bool:
        found = exists(key)
        if key.startswith("ledger/") and not looked:
            decide(store, 1, drops=True, dropped=[6])
            decide(store, 1, trained=[0, 1, 2, 3])
        looked.append(key)
        return found

    monkeypatch.setattr(ObjectStore, "exists", lambda _, key: meanwhile(key))
    leasing.observe()
    leasing.observe()
    counts = leasing.frontier.counts()
    assert (counts.trained, counts.dropped) == (4, {"stale": 1})


def test_what_lies_about_is_not_added_to(store: ObjectStore) -> None:
    """Two steps' worth is open at first; a trainer that finds more than a step's and its reserve ready gets less."""
    window = replace(WINDOW, max_age=3, steps=100)
    leasing = Leasing(store, 1, window, PROMPTS, None, keep_buffered=True)
    opened = []
    for step in range(60):
        live(store, step)
        leasing.observe()
        lease_all(leasing)
        counts = leasing.frontier.counts()
        opened.append(counts.in_flight + counts.buffered)
        decide(store, step + 1, trained=list(range(4 * step, 4 * step + 4)), ready=opened[-1] - 4)
    assert opened[0] == 16
    assert opened[-1] == 4 + 4 + 1


def test_in_order_every_lease_is_bound_to_the_step_that_will_train_it(store: ObjectStore) -> None:
    leasing = Leasing(store, 1, replace(WINDOW, sampler="in_order"), PROMPTS, None, keep_buffered=True)
    live(store, 0)
    leasing.observe()
    assert lease_all(leasing, size=3) == [(0, 1, 2), (3,), (4, 5, 6), (7,)]
    assert [read_lease(store, 1, lease).target_step for lease in range(4)] == [1, 1, 2, 2]
    decide(store, 1, drops=True, dropped=[5])
    leasing.observe()
    assert lease_all(leasing) == [(8,)]
    assert read_lease(store, 1, 4).target_step == 2


def test_in_order_targets_and_failures_survive_a_restart(store: ObjectStore) -> None:
    """Of target 2 two groups are buffered, one was given back, one is new to it; target 3 has not begun."""
    frontier = Frontier()
    frontier.lease(8)
    frontier.buffered([0, 1, 2, 3, 4, 5])
    for ordinal in range(8):
        frontier.set_target_step(ordinal, 1 + ordinal // 4)
    frontier.trained([0, 1, 2, 3], 1)
    frontier.set_failure_count(6, 2)
    leasing = Leasing(
        store, 1, replace(WINDOW, sampler="in_order"), PROMPTS, checkpoint(1, frontier), keep_buffered=True
    )
    live(store, 1)
    leasing.observe()
    assert lease_all(leasing, size=4) == [(6, 7), (8, 9, 10, 11)]
    assert [read_lease(store, 1, lease).target_step for lease in range(2)] == [2, 3]
    assert read_lease(store, 1, 0).failure_counts == {6: 2}


def test_suspects_are_tried_apart_before_anything_else(store: ObjectStore) -> None:
    frontier = Frontier()
    frontier.lease(6)
    leasing = Leasing(store, 1, WINDOW, PROMPTS, checkpoint(0, frontier), keep_buffered=True)
    leasing.heed(Inquest({1: 3}, Suspects(frozenset({0, 1, 2, 3, 4}))))
    live(store, 0)
    leasing.observe()
    assert lease_all(leasing) == [(0,)]
    leasing.arrived(0, (0,))
    assert lease_all(leasing) == [(1,)]
    assert read_lease(store, 1, 1).failure_counts == {1: 3}
    for ordinal in (1, 2, 3):
        leasing.arrived(ordinal, (ordinal,))
        assert lease_all(leasing) == [(ordinal + 1,)]
    leasing.arrived(4, (4,))
    assert lease_all(leasing) == [(5, 6), (7,)], "the last suspect is cleared"


def test_the_checkpoint_that_was_resumed_from_bounds_the_end_of_the_data(store: ObjectStore) -> None:
    frontier = Frontier()
    frontier.lease(8)
    frontier.buffered(range(8))
    frontier.dropped([4], "generation_failed")
    frontier.trained([0, 1, 2, 3], 1)
    window = replace(WINDOW, prompts=9, epochs=1)
    leasing = Leasing(store, 1, window, PROMPTS, checkpoint(1, frontier), keep_buffered=True)
    assert leasing.last_step == 2
    live(store, 1)
    leasing.observe()
    assert lease_all(leasing) == [(8,)]
    decide(store, 2, drops=True, dropped=[8])
    leasing.observe()
    assert leasing.last_step == 1 == leasing.steps_done


def test_a_frontier_state_of_a_checkpoint_is_read_back_as_it_was(store: ObjectStore) -> None:
    frontier = Frontier()
    frontier.lease(3)
    state: dict[str, Any] = checkpoint(0, frontier).frontier  # type: ignore[assignment]
    assert FrontierState.from_json(state) == frontier.checkpoint()


def test_suspects_and_failures_from_before_the_first_checkpoint_are_known_too(store: ObjectStore) -> None:
    leasing = Leasing(store, 1, WINDOW, PROMPTS, None, keep_buffered=True)
    leasing.heed(Inquest({3: 2}, Suspects(frozenset({3, 5}))))
    live(store, 0)
    leasing.observe()
    assert lease_all(leasing) == [(3,)]
    assert read_lease(store, 1, 0).failure_counts == {3: 2}
    leasing.arrived(0, (3,))
    assert lease_all(leasing) == [(5,)]
    leasing.arrived(1, (5,))
    assert lease_all(leasing) == [(0, 1), (2, 4), (6, 7)]


def test_a_seal_that_comes_after_the_ledger_changes_nothing(store: ObjectStore) -> None:
    leasing = Leasing(store, 1, WINDOW, PROMPTS, None, keep_buffered=True)
    live(store, 0)
    leasing.observe()
    lease_all(leasing)
    decide(store, 1, trained=[0, 1, 2, 3])
    leasing.observe()
    leasing.gave_back(1, (2, 3), failed=True)
    assert leasing.frontier.counts().trained == 4


def test_a_lease_that_ends_late_says_nothing_of_an_ordinal_that_is_in_flight_in_another(store: ObjectStore) -> None:
    """Its group came in an early part, went back as stale, and was leased again before the first lease ended."""
    leasing = Leasing(store, 1, WINDOW, PROMPTS, None, keep_buffered=True)
    live(store, 0)
    leasing.observe()
    lease_all(leasing)
    decide(store, 1, drops=True, returned=[2])
    leasing.observe()
    assert lease_all(leasing) == [(2,)]
    leasing.arrived(1, (2, 3))
    leasing.gave_back(4, (2,), failed=True)
    assert lease_all(leasing) == [(2,)]
    assert read_lease(store, 1, 5).failure_counts == {2: 1}


def test_a_cleared_suspect_is_an_ordinal_like_any_other(store: ObjectStore) -> None:
    leasing = Leasing(store, 1, WINDOW, PROMPTS, None, keep_buffered=True)
    leasing.heed(Inquest({}, Suspects(frozenset({0}))))
    live(store, 0)
    leasing.observe()
    assert lease_all(leasing) == [(0,)]
    leasing.arrived(0, (0,))
    assert len(lease_all(leasing)) == 4
    decide(store, 1, drops=True, returned=[0])
    leasing.observe()
    assert lease_all(leasing) == [(0,)], "beside what is in flight"


def test_a_stream_that_ends_just_now_is_not_leased_beyond_its_end(store: ObjectStore) -> None:
    class Ending:
        """Ends when it is next asked for prompts."""

        size: int | None = None

        def recorded(self, wanted: int) -> int | None:
            self.size = 5
            return None

    leasing = Leasing(store, 1, replace(WINDOW, epochs=1), Ending(), None, keep_buffered=True)  # type: ignore[arg-type]
    live(store, 0)
    leasing.observe()
    assert lease_all(leasing) == [(0, 1), (2, 3)]
    assert leasing.last_step == 1
