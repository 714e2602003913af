"""Metrics are read without our code, and what a flow that died had not written comes back from the ledger."""

from __future__ import annotations

import math
from pathlib import Path

import duckdb
import pytest

from storage import layout
from storage.attempts import claim_next
from storage.layout import MetricsName
from storage.ledger import LedgerWriter, Totals, ledger_rows
from storage.metrics import CHUNK_STEPS, Point, complete, read_points, write_points
from storage.objects import ObjectStore


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore.open(str(tmp_path / "run"), {})


def train(store: ObjectStore, steps: range) -> None:
    """The footers of one attempt."""
    claim = claim_next(store, parent=None, host="h", pid=1, pid_started_at=0.0, claimed_at=0.0)
    writer = LedgerWriter(store, claim.attempt)
    for step in steps:
        row = {"ordinal": step, "state": "trained"}
        writer.write_step(step, ledger_rows([row]), Totals(), {"loss": float(step), "kl": math.nan})


def test_duckdb_reads_one_row_per_step_and_metric(store: ObjectStore, tmp_path: Path) -> None:
    points = [Point(1, step, step // 2, 5.0, {"loss": 1.0 / step, "kl": math.inf}) for step in (1, 2, 3)]
    write_points(store, MetricsName(1, 0), points)
    rows = duckdb.sql(f"SELECT * FROM '{tmp_path}/run/metrics/**/*.parquet' ORDER BY step").fetchall()
    assert rows == [(1, step, step // 2, 5.0, "loss", 1.0 / step) for step in (1, 2, 3)]


def test_points_come_back_as_they_were_written(store: ObjectStore) -> None:
    points = [Point(1, 1, 1, 5.0, {"loss": 1.0, "kl": 0.5}), Point(1, 1, 1, 9.0, {"evaluation/sampled": 0.25})]
    assert read_points(store, MetricsName(1, 0)) == []
    write_points(store, MetricsName(1, 0), points)
    assert read_points(store, MetricsName(1, 0)) == points


def test_missing_steps_come_from_the_ledger_and_written_ones_stay(store: ObjectStore) -> None:
    train(store, range(1, CHUNK_STEPS + 3))
    written = Point(1, CHUNK_STEPS, 50, 7.0, {"loss": 100.0, "pool/engines": 1.0})
    write_points(store, written.chunk, [written])
    complete(store, 1, every_steps=2)
    first, second = (read_points(store, MetricsName(1, chunk)) for chunk in (0, 1))
    assert [point.step for point in first] == list(range(1, CHUNK_STEPS))
    assert second[0] == written
    assert second[1:] == [
        Point(1, CHUNK_STEPS + 1, 50, None, {"loss": 101.0}),
        Point(1, CHUNK_STEPS + 2, 51, None, {"loss": 102.0}),
    ]


def test_an_attempt_without_a_step_has_no_metrics(store: ObjectStore) -> None:
    train(store, range(0))
    complete(store, 1, every_steps=1)
    assert store.list(layout.metrics_prefix(1), recursive=True) == []
