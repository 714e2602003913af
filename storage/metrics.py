"""Metrics over steps as Parquet files: one row per step and metric, in chunks of steps of one attempt.

Derived data: the ledger's footers are the record, from which `complete` makes what a flow that died had not written.
A chunk is overwritten while its steps come in, by the flow that owns the attempt; both write the same figures, so it
matters to nobody who was last. Values that are not numbers are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow.compute as pc

from storage import layout, schema
from storage.errors import ObjectMissing
from storage.layout import LedgerName, MetricsName
from storage.ledger import read_ledger_footer
from storage.objects import ObjectStore

CHUNK_STEPS = 100


@dataclass(frozen=True, slots=True)
class Point:
    """What was measured of one step. `version` is that of the weights after it, `at` Unix seconds if they are known."""

    attempt: int
    step: int
    version: int
    at: float | None
    metrics: Mapping[str, float]

    @property
    def chunk(self) -> MetricsName:
        return MetricsName(self.attempt, self.step // CHUNK_STEPS)


def read_points(store: ObjectStore, name: MetricsName) -> list[Point]:
    """The points of a chunk, in the order they were written; none when it is not there."""
    key = layout.metrics(name)
    try:
        rows = schema.decode(store.get(key), name=key)[0].to_pylist()
    except ObjectMissing:
        return []
    points: dict[tuple[int, int, float | None], dict[str, float]] = {}
    for row in rows:
        points.setdefault((row["step"], row["version"], row["at"]), {})[row["name"]] = row["value"]
    return [Point(name.attempt, *place, metrics) for place, metrics in points.items()]


def read_values(store: ObjectStore, name: MetricsName, metrics: Sequence[str]) -> list[tuple[int, str, float]]:
    """(step, metric, value) of these metrics in a chunk, in the order they were written; none when it is not there."""
    key = layout.metrics(name)
    try:
        table, _ = schema.decode(store.get(key), ["step", "name", "value"], name=key)
    except ObjectMissing:
        return []
    wanted = table.filter(pc.field("name").isin(list(metrics)))
    return list(zip(*(wanted.column(column).to_pylist() for column in ("step", "name", "value")), strict=True))


def write_points(store: ObjectStore, name: MetricsName, points: Iterable[Point]) -> None:
    """Write a whole chunk."""
    rows = [
        {"attempt": p.attempt, "step": p.step, "version": p.version, "at": p.at, "name": metric, "value": float(value)}
        for p in points
        for metric, value in p.metrics.items()
        if math.isfinite(value)
    ]
    store.put(layout.metrics(name), schema.encode(schema.table(rows, schema.METRICS), schema.METRICS, {}))


def complete(store: ObjectStore, attempt: int, *, every_steps: int) -> None:
    """Write the steps of `attempt` that the ledger has and its chunks lack; a new version comes every `every_steps`
    steps. Costs one listing and the reading of the last chunk, unless something is missing."""
    found = (layout.parse_ledger(key) for key in store.list(layout.ledger_prefix(attempt), recursive=True))
    steps: dict[int, list[int]] = {}
    for ledger in found:
        if ledger is not None and ledger.drops is None:
            steps.setdefault(ledger.step // CHUNK_STEPS, []).append(ledger.step)
    there = set(store.list(layout.metrics_prefix(attempt), recursive=True))
    for chunk, wanted in sorted(steps.items()):
        name = MetricsName(attempt, chunk)
        if layout.metrics(name) in there and chunk != max(steps):
            continue
        points = read_points(store, name)
        missing = sorted(set(wanted) - {point.step for point in points})
        if missing:
            write_points(store, name, [*points, *(_from_ledger(store, attempt, step, every_steps) for step in missing)])


def _from_ledger(store: ObjectStore, attempt: int, step: int, every_steps: int) -> Point:
    footer = read_ledger_footer(store, LedgerName(attempt, step))
    measured = {name: value for name, value in footer.metrics.items() if value is not None}
    return Point(attempt, step, step // every_steps, None, measured)
