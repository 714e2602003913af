"""Continuing a run, and every step after that, costs the same whatever came before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.resume import BUFFERED, PROMPTS, History, Stopwatch, decided, resume, rows
from flows import inquest
from flows.leasing import Leasing
from flows.views.status import status
from storage import schema
from storage.ledger import LedgerWriter, Totals, ledger_rows
from storage.objects import ObjectStore
from storage.pool import RefitRecord, write_refit
from storage.trajectories import TrajectoryStore
from tests.flows.requests import requests_of

SHORT, LONG = 100, 10_100
# How many leases an inquest looks at. Both histories have more in their newest directory.
INQUEST = 20


def make_step(store: ObjectStore, leasing: Leasing, step: int) -> None:
    """What flow and trainer of attempt 2 write for a step, up to its refit."""
    record = leasing.next_lease(PROMPTS)
    assert record is not None
    table = schema.table(rows(range(record.ordinals[0], record.ordinals[-1] + 1), step - 1), schema.SHARD)
    TrajectoryStore(store, 2).append(record.lease, table, last=True)
    LedgerWriter(store, 2).write_step(step, ledger_rows(decided(step)), Totals(), {})
    write_refit(store, RefitRecord(2, step, step, ("engine-0",), {}, {}))


def counts(root: Path, steps: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Requests of a resume after so many steps, of each of the next three, and of looking at the run."""
    History(root, steps, leases=INQUEST).write()
    found: list[Any] = []
    count = {"resume": requests_of(lambda: found.extend(resume(root, Stopwatch())), monkeypatch)}
    leasing, feed = found
    assert sorted(feed.groups) == list(range(steps * PROMPTS, (steps + BUFFERED) * PROMPTS))
    store = ObjectStore.open(str(root))
    write_refit(store, RefitRecord(2, steps, steps, ("engine-0",), {}, {}))
    leasing.observe()
    for number in (1, 2, 3):
        make_step(store, leasing, steps + number)
        count[f"step {number}"] = requests_of(lambda: (leasing.observe(), feed.poll()), monkeypatch)
    assert leasing.steps_done == steps + 3 and len(feed.groups) == (BUFFERED + 3) * PROMPTS
    return count | {"status": requests_of(lambda: status(store), monkeypatch)}


def test_requests_do_not_grow_with_the_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquest, "LEASES", INQUEST)
    short, long = (counts(tmp_path / str(steps), steps, monkeypatch) for steps in (SHORT, LONG))
    assert short == long
    assert short["step 1"] == short["step 2"] == short["step 3"]
