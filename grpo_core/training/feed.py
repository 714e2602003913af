"""What rank 0 learns from the store: leases in flight, groups that arrived, decisions to take.

Invariants: the frontier here moves only by what is durable in the store (lease records, parts) and by what rank 0
itself decides and ledgers; parts are read whole and once; the cost of a poll is that of the open leases. A group whose
tokens have a stamp from outside the living history is marked, so that whoever is past admission need not look at the
attempt of a span again: there, versions are those of one line of weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from grpo_core.rollout.rows import OK
from grpo_core.schedule.admission import GENERATION_FAILED, Candidate
from grpo_core.schedule.frontier import Frontier, OrdinalState
from grpo_core.training.batch import Row
from grpo_core.training.step import FILLER, Place
from grpo_core.trajectory import LENGTH, Stamp, VersionSpan
from storage import layout
from storage.attempts import Link
from storage.layout import PartName
from storage.leases import list_leases
from storage.objects import ObjectStore
from storage.schema import list_views
from storage.trajectories import PartFooter, TrajectoryStore

# What a shard says about a rollout beside its tokens, the same in all of its rows but for the prompt.
ROLLOUT_FACTS = (
    "finish_reason", "prompt_length", "turns", "tool_calls", "tool_failures", "tool_seconds", "submitted_at",
    "finished_at", "joins_clean", "joins_realign", "joins_fork", "drift_tokens", "drift_max", "tool_rounds",
    "unknown_tool_calls", "malformed_tool_calls", "tool_usage", "environment_usage",
    # Of the whole group.
    "failed_requests", "aborted_requests", "discarded_tokens", "scoring_wait_seconds", "scoring_seconds",
)  # fmt: skip
ROW_COLUMNS = ("token_ids", "loss_mask", "logprobs", "version_spans")
COLUMNS = (
    "ordinal", "rollout", *ROW_COLUMNS, "reward", "status", "error", "epoch", "dataset_index",
    "engine", "reward_components", *ROLLOUT_FACTS,
)  # fmt: skip
LEASABLE = (OrdinalState.NEW, OrdinalState.RETURNED)
FILLER_ROW = Row(np.zeros(1, np.int32), np.zeros(1, bool), np.zeros(1, np.float32), ())


@dataclass(frozen=True, slots=True)
class BufferedGroup:
    """One whole group in a part. `rows[i]` are its row numbers there, `rollouts[i]` the rollout each belongs to;
    `rewards` has one value per rollout, NaN where it could not be scored, and so has each of `components`, by source;
    `lengths` (generated tokens) and `truncated` too. `facts` has ROLLOUT_FACTS by name for each rollout that there is.
    `foreign`: some token was sampled from weights outside the living history.
    `teaches`: some rollout has an advantage."""

    ordinal: int
    part: PartName
    rows: tuple[int, ...]
    rollouts: tuple[int, ...]
    rewards: tuple[float, ...]
    oldest_version: int
    newest_version: int
    epoch: int
    dataset_index: int
    failure: str | None
    foreign: bool
    engines: frozenset[str] = frozenset()
    lengths: tuple[int, ...] = ()
    truncated: tuple[bool, ...] = ()
    components: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    facts: tuple[Mapping[str, Any], ...] = ()
    teaches: bool = True

    def candidate(self, distrusted: Mapping[str, int], *, target_step: int | None = None) -> Candidate:
        """As admission sees it. `distrusted`: engine → the version with which it failed its refit; whatever it
        sampled from there on may come from weights that are nobody's."""
        # One word for the ledger; the cause stays with the tombstone in its shard.
        failure = None if self.failure is None else GENERATION_FAILED
        doubtful = any(self.newest_version >= distrusted.get(engine, math.inf) for engine in self.engines)
        return Candidate(
            self.ordinal,
            self.oldest_version,
            self.newest_version,
            failure,
            foreign=self.foreign or doubtful,
            target_step=target_step,
            zero_variance=not self.teaches,
        )

    def places(self) -> list[Place]:
        key = layout.part(self.part.attempt, self.part.lease, self.part.part)
        return [Place(key, row) for row in self.rows]


class PartCache:
    """The rows of the parts that are in use, as NumPy views. `keep` forgets the others."""

    def __init__(self, trajectories: TrajectoryStore) -> None:
        self._trajectories = trajectories
        self._rows: dict[str, list[Row]] = {FILLER.part: [FILLER_ROW]}

    def add(self, key: str, table: pa.Table) -> list[Row]:
        self._rows[key] = table_rows(table)
        return self._rows[key]

    def rows(self, places: Sequence[Place]) -> list[Row]:
        """The rows at `places`, reading what makes rows of the parts that this rank has not seen: a part is one object
        and comes whole, but nothing else in it is decoded."""
        for key in {place.part for place in places} - self._rows.keys():
            name = layout.parse_part(key)
            assert name is not None
            self.add(key, self._trajectories.read_part(name, ROW_COLUMNS)[1])
        return [self._rows[place.part][place.row] for place in places]

    def keep(self, keys: Iterable[str]) -> None:
        wanted = {FILLER.part, *keys}
        self._rows = {key: rows for key, rows in self._rows.items() if key in wanted}


@dataclass(frozen=True, slots=True)
class Lineage:
    """The living history of weights. `newest` maps each of its attempts to the last version that belongs to it; None:
    every version does."""

    newest: Mapping[int, int | None]

    @classmethod
    def of(cls, chain: Iterable[Link], *, every_steps: int) -> Lineage:
        """The weights of a living chain, which have a new version every `every_steps` steps."""
        return cls({link.attempt: None if link.last_step is None else link.last_step // every_steps for link in chain})

    def holds(self, span: VersionSpan) -> bool:
        if span.attempt not in self.newest:
            return False
        newest = self.newest[span.attempt]
        return newest is None or span.version <= newest


class Feed:
    """The buffered groups of one attempt, each of `rollouts` rollouts, of which at least `least` must have succeeded.
    `teaches` says of a group that can be trained whether any of its rollouts has an advantage. `groups` maps ordinal →
    group; the caller takes out what it decides."""

    def __init__(
        self,
        store: ObjectStore,
        trajectories: TrajectoryStore,
        attempt: int,
        frontier: Frontier,
        cache: PartCache,
        *,
        rollouts: int,
        least: int,
        lineage: Lineage,
        teaches: Callable[[BufferedGroup], bool],
    ) -> None:
        self._store = store
        self._trajectories = trajectories
        self._attempt = attempt
        self.frontier = frontier
        self.cache = cache
        self._rollouts = rollouts
        self._least = least
        self._lineage = lineage
        self._teaches = teaches
        self.groups: dict[int, BufferedGroup] = {}
        self._last_lease = -1
        self._open: dict[int, int] = {}  # lease → number of the next part to look for
        self._coming: dict[int, tuple[int, int]] = {}  # open lease → its version at dispatch, ordinals in flight

    @property
    def last_lease(self) -> int:
        """The newest lease of this attempt that was read; −1 before the first."""
        return self._last_lease

    @property
    def in_flight(self) -> dict[int, int]:
        """Ordinals in flight by the version they were dispatched with."""
        counts: Counter[int] = Counter()
        for version, count in self._coming.values():
            counts[version] += count
        return dict(counts)

    def candidates(self, distrusted: Mapping[str, int]) -> list[Candidate]:
        """The buffered groups as admission sees them."""
        targets = self.frontier.target_steps
        return [group.candidate(distrusted, target_step=targets.get(group.ordinal)) for group in self.groups.values()]

    def restore(self, pinned: Iterable[PartName], buffered: Iterable[int]) -> None:
        """Take up the buffered groups that the checkpoint relies on."""
        ordinals = set(buffered)
        for name in pinned:
            _, table = self._trajectories.read_part(name, COLUMNS)
            self._remember(name, table, ordinals)

    def poll(self) -> bool:
        """Read what is new. Whether there was anything."""
        before = (self._last_lease, sum(self._open.values()), len(self._open))
        for record in list_leases(self._store, self._attempt, after=self._last_lease):
            if any(self.frontier.state(ordinal) not in LEASABLE for ordinal in record.ordinals):
                # The seal that gave them back is older than this record, so it is there to be read.
                self._take_parts()
            self.frontier.leased(record.ordinals)
            for ordinal, count in record.failure_counts.items():
                self.frontier.set_failure_count(ordinal, count)
            if record.target_step is not None:
                for ordinal in record.ordinals:
                    self.frontier.set_target_step(ordinal, record.target_step)
            self._open[record.lease] = 0
            self._coming[record.lease] = (Stamp.parse(record.stamp).version, len(record.ordinals))
            self._last_lease = record.lease
        self._take_parts()
        return before != (self._last_lease, sum(self._open.values()), len(self._open))

    def _take_parts(self) -> None:
        """Take the next parts of the open leases, each lease's in their order without a gap: a listing that runs while
        parts are written may miss one and show a later one."""
        for name in self._trajectories.open_parts(self._open):
            if name.part == self._open.get(name.lease):
                self._take(*self._trajectories.read_part(name, COLUMNS))

    def _take(self, footer: PartFooter, table: pa.Table) -> None:
        self.frontier.buffered(footer.ordinals)
        self._remember(footer.name, table, set(footer.ordinals))
        self.frontier.returned(footer.returned)
        if footer.last:
            del self._open[footer.name.lease], self._coming[footer.name.lease]
        else:
            version, count = self._coming[footer.name.lease]
            self._open[footer.name.lease] = footer.name.part + 1
            self._coming[footer.name.lease] = (version, count - len(footer.ordinals))

    def _remember(self, name: PartName, table: pa.Table, ordinals: set[int]) -> None:
        rows = self.cache.add(layout.part(name.attempt, name.lease, name.part), table)
        for group in part_groups(name, table, rows, rollouts=self._rollouts, least=self._least, lineage=self._lineage):
            if group.ordinal in ordinals:
                teaches = group.failure is not None or self._teaches(group)
                self.groups[group.ordinal] = replace(group, teaches=teaches)


def table_rows(table: pa.Table) -> list[Row]:
    """Every row of a part; token columns stay NumPy views of the Arrow buffers."""
    ids, masks, logprobs = (list_views(table.column(name)) for name in ("token_ids", "loss_mask", "logprobs"))
    spans = table.column("version_spans").to_pylist()
    return [
        Row(
            ids.values[ids.offsets[i] : ids.offsets[i + 1]],
            masks.values[masks.offsets[i] : masks.offsets[i + 1]].astype(bool),
            logprobs.values[logprobs.offsets[i] : logprobs.offsets[i + 1]],
            tuple(VersionSpan(**span) for span in spans[i]),
        )
        for i in range(table.num_rows)
    ]


def part_groups(
    name: PartName, table: pa.Table, rows: Sequence[Row], *, rollouts: int, least: int, lineage: Lineage
) -> list[BufferedGroup]:
    """The groups of a part, in order of their ordinals. A whole group has the rollouts 0 to `rollouts` − 1, or at least
    `least` of them where the others failed for good: those have no reward and do not touch the baseline."""
    ordinals, numbers, rewards, epochs, indices, statuses, errors, engines, endings, components = (
        table.column(column).to_pylist()
        for column in (
            "ordinal", "rollout", "reward", "epoch", "dataset_index", "status", "error", "engine", "finish_reason", "reward_components",
        )
    )  # fmt: skip
    facts = table.select(ROLLOUT_FACTS).to_pylist()
    members: dict[int, list[int]] = {}
    for row, ordinal in enumerate(ordinals):
        members.setdefault(ordinal, []).append(row)
    groups = []
    for ordinal, where in sorted(members.items()):
        by_rollout = {numbers[row]: row for row in where}
        scores = _scores({number: rewards[row] for number, row in by_rollout.items()}, rollouts)
        sources = {number: dict(components[row] or ()) for number, row in by_rollout.items()}
        lengths: Counter[int] = Counter()
        for row in where:
            lengths[numbers[row]] += int(rows[row].generated.sum())
        spans = [span for row in where for span in rows[row].spans]
        versions = [span.version for span in spans]
        failure = next((errors[row] or "failed" for row in where if statuses[row] != OK), None)
        if failure is None and not (by_rollout.keys() <= set(range(rollouts)) and len(by_rollout) >= least):
            failure = "incomplete group"
        if failure is None and not versions:
            failure = "no token was generated"
        if failure is None and np.isnan(scores).all():
            failure = "no rollout could be scored"
        groups.append(
            BufferedGroup(
                ordinal=ordinal,
                part=name,
                rows=tuple(where),
                rollouts=tuple(numbers[row] for row in where),
                rewards=scores,
                oldest_version=min(versions, default=0),
                newest_version=max(versions, default=0),
                epoch=epochs[where[0]],
                dataset_index=indices[where[0]],
                failure=failure,
                foreign=not all(lineage.holds(span) for span in spans),
                # The turns of one rollout may come from several engines.
                engines=frozenset(name for row in where for name in engines[row].split(",")),
                lengths=tuple(lengths[number] for number in range(rollouts)),
                truncated=tuple(
                    number in by_rollout and endings[by_rollout[number]] == LENGTH for number in range(rollouts)
                ),
                components={
                    name: _scores({number: values.get(name) for number, values in sources.items()}, rollouts)
                    for name in dict.fromkeys(name for values in sources.values() for name in values)
                },
                facts=tuple(facts[row] for row in {numbers[row]: row for row in reversed(where)}.values()),
            )
        )
    return groups


def _scores(by_rollout: Mapping[int, float | None], rollouts: int) -> tuple[float, ...]:
    """One value per rollout, NaN where there is none."""
    values = (by_rollout.get(number) for number in range(rollouts))
    return tuple(math.nan if value is None else float(value) for value in values)
