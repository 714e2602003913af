"""The ledger: what the trainer decided about each ordinal, per step and in between.

One writer, the trainer of the newest attempt. `step-…` holds the decisions of an optimizer step, `step-….drops-k`
those made while waiting for it. Each file is written once and before the effects it records are relied on. Each footer
carries the cumulative totals of the living history up to it, so the state of a run is one footer away. Rows of a dead
branch (after the step a later attempt resumed from) stay in the store and are left out by readers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from storage import layout, schema
from storage.attempts import Link, living_chain
from storage.errors import DamagedShard, Fenced
from storage.footers import read_metadata
from storage.layout import LedgerName
from storage.objects import ObjectStore
from storage.records import new_writer

TRAINED, DROPPED, RETURNED = "trained", "dropped", "returned"


@dataclass(frozen=True, slots=True)
class Totals:
    """Cumulative over the living history: ordinals by outcome, tokens, mean reward of trained groups, tokens per lag.

    `returned` counts events (an ordinal may be returned several times); `reward_*` is the mean reward of the groups
    of the first, the latest and the best step.
    """

    trained: int = 0
    returned: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    tokens_generated: int = 0
    tokens_trained: int = 0
    tokens_masked: int = 0
    reward_first: float | None = None
    reward_last: float | None = None
    reward_best: float | None = None
    lag_tokens: Mapping[int, int] = field(default_factory=dict)

    def add(self, rows: pa.Table, lag_tokens: Mapping[int, int] | None = None) -> Totals:
        """The totals after these ledger rows; `lag_tokens` maps a lag to how many of their trained tokens had it."""
        states = rows.column("state")
        dropped = dict(self.dropped)
        for reason in rows.filter(pc.equal(states, DROPPED)).column("reason").to_pylist():
            dropped[reason] = dropped.get(reason, 0) + 1
        lags = dict(self.lag_tokens)
        for lag, tokens in (lag_tokens or {}).items():
            lags[lag] = lags.get(lag, 0) + tokens
        trained = rows.filter(pc.equal(states, TRAINED))
        rewards = trained.column("reward_mean")
        reward = pc.mean(rewards.filter(pc.is_finite(rewards))).as_py()
        return Totals(
            trained=self.trained + trained.num_rows,
            returned=self.returned + rows.filter(pc.equal(states, RETURNED)).num_rows,
            dropped=dropped,
            tokens_generated=self.tokens_generated + _sum(rows, "tokens_generated"),
            tokens_trained=self.tokens_trained + _sum(rows, "tokens_trained"),
            tokens_masked=self.tokens_masked + _sum(rows, "tokens_masked"),
            reward_first=reward if self.reward_first is None else self.reward_first,
            reward_last=self.reward_last if reward is None else reward,
            reward_best=max((r for r in (self.reward_best, reward) if r is not None), default=None),
            lag_tokens=lags,
        )

    @property
    def settled(self) -> int:
        """Ordinals in a terminal state."""
        return self.trained + sum(self.dropped.values())

    def lag(self, quantile: float) -> int | None:
        """The lowest lag that at least this share of the trained tokens does not exceed; None before any."""
        wanted = quantile * sum(self.lag_tokens.values())
        seen = 0
        for lag, tokens in sorted(self.lag_tokens.items()):
            seen += tokens
            if seen >= wanted:
                return lag
        return None

    @property
    def lag_mean(self) -> float | None:
        tokens = sum(self.lag_tokens.values())
        return sum(lag * count for lag, count in self.lag_tokens.items()) / tokens if tokens else None


@dataclass(frozen=True, slots=True)
class LedgerFooter:
    """`metrics` values that were not finite are None."""

    name: LedgerName
    writer: str
    totals: Totals
    metrics: Mapping[str, float | None]

    @property
    def step_done(self) -> int:
        """The step that the run had finished when this was written."""
        return self.name.step if self.name.drops is None else self.name.step - 1


class LedgerWriter:
    """The one writer of an attempt's ledger. `fence` raises Fenced when a newer attempt owns the run."""

    def __init__(self, store: ObjectStore, attempt: int, *, fence: Callable[[], None] | None = None) -> None:
        self._store = store
        self._attempt = attempt
        self._fence = fence
        self._drops_of_step = (-1, 0)

    def write_step(self, step: int, rows: pa.Table, totals: Totals, metrics: Mapping[str, float]) -> LedgerName:
        """Record the decisions of an optimizer step: `totals` include these rows. Raise Fenced if another wrote it."""
        return self._write(LedgerName(self._attempt, step), rows, totals, metrics)

    def write_drops(self, step: int, rows: pa.Table, totals: Totals) -> LedgerName:
        """Record what was dropped or returned while waiting for `step`. Raise Fenced if another wrote it."""
        previous, count = self._drops_of_step
        drops = count if previous == step else 0
        name = self._write(LedgerName(self._attempt, step, drops), rows, totals, {})
        self._drops_of_step = (step, drops + 1)
        return name

    def _write(self, name: LedgerName, rows: pa.Table, totals: Totals, metrics: Mapping[str, float]) -> LedgerName:
        if self._fence is not None:
            self._fence()
        metadata = {
            "attempt": str(name.attempt),
            "step": str(name.step),
            "drops": json.dumps(name.drops),
            "writer": new_writer(),
            "totals": json.dumps(asdict(totals), allow_nan=False),
            "metrics": json.dumps({key: value if math.isfinite(value) else None for key, value in metrics.items()}),
        }
        for column, value in (("attempt", name.attempt), ("step", name.step)):
            described = schema.LEDGER.field(column)
            values = pa.repeat(pa.scalar(value, described.type), rows.num_rows)
            rows = rows.set_column(rows.column_names.index(column), described, values)
        key = layout.ledger(name)
        if not self._store.commit(key, schema.encode(rows, schema.LEDGER, metadata)):
            raise Fenced(f"Another process already wrote {key}: this trainer no longer owns the run and must stop.")
        return name


def ledger_rows(rows: Iterable[Mapping[str, object]]) -> pa.Table:
    """Rows as dicts of `schema.LEDGER`; the writer fills in `attempt` and `step`."""
    return schema.table(({"attempt": 0, "step": 0, **row} for row in rows), schema.LEDGER)


def ledger_names(store: ObjectStore, *, all_attempts: bool = False) -> list[LedgerName]:
    """The files of the living history (or all), in the order they were written."""
    prefixes: dict[str, Link | None] = {layout.ledger_prefix(): None}
    if not all_attempts:
        prefixes = {layout.ledger_prefix(link.attempt): link for link in living_chain(store)}
    names = []
    for prefix, link in prefixes.items():
        found = (layout.parse_ledger(key) for key in store.list(prefix, recursive=True))
        names += [name for name in found if name and (link is None or link.contains(name.attempt, name.step))]
    return sorted(names, key=lambda name: name.written_order)


def read_ledger(store: ObjectStore, *, all_attempts: bool = False) -> pa.Table:
    """The rows of the living history (or of all attempts), in the order they were written."""
    tables = [schema.LEDGER.empty_table()]
    for name in ledger_names(store, all_attempts=all_attempts):
        key = layout.ledger(name)
        tables.append(schema.decode(store.get(key), name=key)[0])
    return pa.concat_tables(tables, promote_options="default")


def read_ledger_footer(store: ObjectStore, name: LedgerName) -> LedgerFooter:
    """Read the end of a file only. Raise ObjectMissing or DamagedShard."""
    key = layout.ledger(name)
    return _footer(name, read_metadata(store, key), key)


def read_ledger_file(
    store: ObjectStore, name: LedgerName, columns: Sequence[str] | None = None
) -> tuple[pa.Table, LedgerFooter]:
    """Rows and footer of one file. Raise ObjectMissing or DamagedShard."""
    key = layout.ledger(name)
    rows, metadata = schema.decode(store.get(key), columns, name=key)
    return rows, _footer(name, metadata, key)


def _footer(name: LedgerName, metadata: Mapping[str, str], key: str) -> LedgerFooter:
    try:
        fields = json.loads(metadata["totals"])
        fields["lag_tokens"] = {int(lag): tokens for lag, tokens in fields["lag_tokens"].items()}
        return LedgerFooter(name, metadata["writer"], Totals(**fields), json.loads(metadata["metrics"]))
    except (KeyError, ValueError, TypeError) as error:
        raise DamagedShard(f"Parquet object {key} is not a ledger file: {type(error).__name__} {error}.") from error


def newest_footer(store: ObjectStore, *, steps_only: bool = False) -> LedgerFooter | None:
    """The latest footer of the living history: a few listings of one directory, whatever the length of the run."""
    for link in reversed(living_chain(store)):
        directories = store.directories(layout.ledger_prefix(link.attempt))
        if link.last_step is not None:
            last = layout.ledger_directory(link.attempt, link.last_step)
            directories = [directory for directory in directories if directory <= last]
        for directory in reversed(directories):
            found = (layout.parse_ledger(key) for key in store.list(directory))
            names = [name for name in found if name and link.contains(name.attempt, name.step)]
            names = [name for name in names if name.drops is None or not steps_only]
            if names:
                return read_ledger_footer(store, max(names, key=lambda name: name.written_order))
    return None


def _sum(rows: pa.Table, column: str) -> int:
    return int(pc.sum(rows.column(column)).as_py() or 0)
