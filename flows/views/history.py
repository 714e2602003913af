"""`forebay ledger`: what became of every ordinal, one line each.

Contract: in the living history each ordinal appears exactly once, with its newest state; the rows that dead branches
wrote are shown only when asked for. Reads every ledger file, but of the shards only those that are still buffered.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
from rich.console import RenderableType
from rich.table import Table

from flows.views.standing import OpenOrdinal, recorded_run, standing
from flows.views.terminal import figure, plain
from storage import layout, schema
from storage.layout import LedgerName, PartName
from storage.ledger import RETURNED, TRAINED, ledger_names
from storage.objects import PARALLEL_REQUESTS, ObjectStore
from storage.trajectories import TrajectoryStore

COLUMNS = ("ordinal", "state", "step", "version_min", "version_max", "lag_max", "reward_mean", "reason", "lease")

Line = dict[str, Any]


def ledger_lines(store: ObjectStore, all_attempts: bool = False) -> list[Line]:
    """One line per ordinal with the keys COLUMNS, ascending; `step` and lags are those of the step that trained it.

    With `all_attempts` each line also has `attempt` (who decided, or holds the lease) and `living`, and the lines of
    dead branches, false in `living`, follow those of the living history. Raise RunRefused when there is no run.
    """
    place = standing(store, recorded_run(store))
    living = ledger_names(store)
    lines = {line["ordinal"]: line for line in _decided(store, living) if line["state"] != RETURNED}
    still_open = {ordinal: found for ordinal, found in place.open.items() if ordinal not in lines}
    lines |= {line["ordinal"]: line for line in _open(store, still_open)}
    rows = [{**lines[ordinal], "living": True} for ordinal in sorted(lines)]
    if all_attempts:
        known = set(living)
        dead = [name for name in ledger_names(store, all_attempts=True) if name not in known]
        rows += [{**line, "living": False} for line in _decided(store, dead)]
        return rows
    return [{name: row[name] for name in COLUMNS} for row in rows]


def json_lines(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """One JSON object per line."""
    return (json.dumps(row, allow_nan=False) for row in rows)


def render_ledger(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """`ledger_lines` as a table."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    names = ["ordinal", "state", "step", "versions", "lag max", "reward", "lease", "reason"]
    with_attempts = bool(rows) and "attempt" in rows[0]
    for name in (["attempt"] if with_attempts else []) + names:
        table.add_column(name, justify="left" if name in ("state", "reason", "versions") else "right")
    for row in rows:
        low, high = row["version_min"], row["version_max"]
        versions = None if low is None else str(low) if low == high else f"{low}–{high}"
        cells = [
            row["ordinal"],
            row["state"].replace("_", " "),
            row["step"],
            versions,
            row["lag_max"],
            figure(row["reward_mean"]),
            row["lease"],
            row["reason"],
        ]
        style = "" if row.get("living", True) else "dim strike"
        table.add_row(*(plain(cell, style) for cell in ([row["attempt"]] if with_attempts else []) + cells))
    return table


def _decided(store: ObjectStore, names: Sequence[LedgerName]) -> Iterator[Line]:
    """The decisions in these ledger files, in order."""

    def read(name: LedgerName) -> pa.Table:
        key = layout.ledger(name)
        return schema.decode(store.get(key), ["attempt", *COLUMNS], name=key)[0]

    with ThreadPoolExecutor(PARALLEL_REQUESTS) as readers:
        for table in readers.map(read, names):
            for row in table.to_pylist():
                trained = row["state"] == TRAINED
                yield {**row, "step": row["step"] if trained else None, "reward_mean": _rounded(row["reward_mean"])}


def _open(store: ObjectStore, found: Mapping[int, OpenOrdinal]) -> Iterator[Line]:
    """Lines of what is not decided; those of buffered groups say what their parts say."""
    groups = _groups(
        store, sorted({each.part for each in found.values() if each.part is not None and each.reason is None})
    )
    for ordinal, each in found.items():
        attempt, lease, _ = each.order
        facts = groups.get((each.part, ordinal), {}) if each.part is not None else {}
        yield {
            **dict.fromkeys(COLUMNS),
            **facts,
            "ordinal": ordinal,
            "state": str(each.state),
            "reason": each.reason,
            "attempt": attempt or None,
            "lease": lease if attempt else None,
        }


def _groups(store: ObjectStore, parts: Sequence[PartName]) -> dict[tuple[PartName, int], Line]:
    """Versions and mean reward of every group in these parts."""
    trajectories = TrajectoryStore(store, 0)
    groups = {}
    for part in parts:
        _, rows = trajectories.read_part(part, ["ordinal", "rollout", "min_version", "max_version", "reward"])
        # A rollout that forked has several rows and one reward.
        rollouts = rows.group_by(["ordinal", "rollout"]).aggregate(
            [("min_version", "min"), ("max_version", "max"), ("reward", "max")]
        )
        by_ordinal = rollouts.group_by("ordinal").aggregate(
            [("min_version_min", "min"), ("max_version_max", "max"), ("reward_max", "mean")]
        )
        for row in by_ordinal.to_pylist():
            groups[part, row["ordinal"]] = {
                "version_min": row["min_version_min_min"],
                "version_max": row["max_version_max_max"],
                "reward_mean": _rounded(row["reward_max_mean"]),
            }
    return groups


def _rounded(value: float | None) -> float | None:
    """Stored as float32; its digits beyond the sixth are noise."""
    return None if value is None else round(value, 6)
