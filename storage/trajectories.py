"""Trajectories: the parts of leases, each an immutable Parquet shard of whole groups.

The parts of a lease form a dense log 0, 1, 2, … that ends with a part marked `last`. Its writers need no agreement but
the exclusive create of a name: a writer subtracts the ordinals that the existing parts already hold and tries the next
number; when it loses that number, it subtracts the winner's ordinals and tries again. So a retried task and its slow
twin complete each other and no group is written twice. A lease ends only by its last part: the task's own, or the one
by which the flow seals an expired lease and thereby returns the ordinals that are missing.

Readers trust nothing but names and footers. Were an ordinal ever in two parts of one lease, the lowest part holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from storage import layout, schema
from storage.errors import DamagedShard
from storage.footers import read_metadata
from storage.layout import PartName
from storage.objects import PARALLEL_REQUESTS, ObjectStore
from storage.records import new_writer


@dataclass(frozen=True, slots=True)
class PartFooter:
    """What a part says about itself. `ordinals` have groups here; `returned` ones were given back, to lease again."""

    name: PartName
    writer: str
    last: bool
    ordinals: tuple[int, ...]
    returned: tuple[int, ...]
    metadata: Mapping[str, str]

    @property
    def settled(self) -> frozenset[int]:
        """Ordinals that no later part of the lease may hold."""
        return frozenset(self.ordinals) | frozenset(self.returned)


class TrajectoryStore:
    """Writes and reads the parts of one attempt's leases; `read` takes the parts of any attempt.

    `fence` is called before each write and raises Fenced when a newer attempt owns the run. `metadata` (digests of
    tokenizer, chat template and dataset, code version) goes into every footer.
    """

    def __init__(
        self,
        store: ObjectStore,
        attempt: int,
        *,
        fence: Callable[[], None] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._store = store
        self._attempt = attempt
        self._fence = fence
        self._metadata = dict(metadata or {})

    def write_part(
        self, lease: int, part: int, table: pa.Table, *, last: bool = False, returned: Iterable[int] = ()
    ) -> bool:
        """Commit `table` (rows of `schema.SHARD`) as this part. False: somebody else already committed it.

        The store fills in `attempt`, `lease` and `part`.
        """
        name = PartName(self._attempt, lease, part)
        metadata = self._metadata | {
            "attempt": str(self._attempt),
            "lease": str(lease),
            "part": str(part),
            "writer": new_writer(),
            "last": json.dumps(last),
            "ordinals": json.dumps(_ordinals(table)),
            "returned": json.dumps(sorted(returned)),
        }
        data = schema.encode(_named(table, name), schema.SHARD, metadata)
        if self._fence is not None:
            self._fence()
        return self._store.commit(layout.part(self._attempt, lease, part), data)

    def append(
        self, lease: int, table: pa.Table, *, last: bool = False, returned: Iterable[int] = ()
    ) -> PartName | None:
        """Write the groups of `table` that no part of the lease holds yet, as its next part.

        Return the part written; None when nothing was left to write, or the lease has ended (its missing ordinals
        then belong to whoever leased them again). With `last` the part is written even when it is empty.
        """
        footers = [self.read_footer(name) for name in self.open_parts([lease])]
        while not any(footer.last for footer in footers):
            settled = frozenset().union(*(footer.settled for footer in footers))
            missing = _without(table, settled)
            given_back = sorted(set(returned) - settled - set(_ordinals(missing)))
            if not missing.num_rows and not given_back and not last:
                return None
            name = PartName(self._attempt, lease, len(footers))
            if self.write_part(lease, name.part, missing, last=last, returned=given_back):
                return name
            footers.append(self.read_footer(name))
        return None

    def seal(self, lease: int, ordinals: Iterable[int]) -> PartFooter:
        """End a lease of these ordinals, returning those that have no group yet; the footer of its last part.

        The last part may be the task's own, if it came first.
        """
        expected = frozenset(ordinals)
        empty = schema.SHARD.empty_table()
        footers = [self.read_footer(name) for name in self.open_parts([lease])]
        while not any(footer.last for footer in footers):
            missing = expected.difference(*(footer.settled for footer in footers))
            name = PartName(self._attempt, lease, len(footers))
            self.write_part(lease, name.part, empty, last=True, returned=missing)
            footers.append(self.read_footer(name))
        return next(footer for footer in footers if footer.last)

    def open_parts(self, leases: Iterable[int]) -> list[PartName]:
        """The parts that exist now of these leases of this attempt, in order of lease and part."""
        wanted = set(leases)
        prefixes = layout.parts_of(self._attempt, wanted)
        names = (layout.parse_part(key) for prefix in prefixes for key in self._store.list(prefix))
        return sorted(name for name in names if name is not None and name.lease in wanted)

    def read_footer(self, part: PartName) -> PartFooter:
        """Read the end of a part only. Raise ObjectMissing or DamagedShard."""
        key = layout.part(part.attempt, part.lease, part.part)
        return _footer(part, read_metadata(self._store, key), key)

    def read_part(self, part: PartName, columns: Sequence[str] | None = None) -> tuple[PartFooter, pa.Table]:
        """One part, read whole and verified. Raise ObjectMissing or DamagedShard."""
        key = layout.part(part.attempt, part.lease, part.part)
        table, metadata = schema.decode(self._store.get(key), columns, name=key)
        return _footer(part, metadata, key), table

    def read(self, parts: Iterable[PartName], columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of these parts in order of attempt, lease and part; each ordinal of a lease from its lowest part.

        Every part is read whole and verified. The result has one chunk per part, so nothing is copied. Raise
        ObjectMissing or DamagedShard.
        """
        ordered = sorted(set(parts))
        names = None if columns is None else list(dict.fromkeys([*columns, "ordinal"]))
        with ThreadPoolExecutor(max_workers=PARALLEL_REQUESTS) as readers:
            loaded = list(readers.map(lambda part: self.read_part(part, names), ordered))
        settled: dict[tuple[int, int], frozenset[int]] = {}
        tables = [schema.SHARD.empty_table().select(names or schema.SHARD.names)]
        for footer, table in loaded:
            lease = (footer.name.attempt, footer.name.lease)
            held = settled.get(lease, frozenset())
            tables.append(_without(table, held))
            settled[lease] = held.union(footer.ordinals)
        return pa.concat_tables(tables, promote_options="default").select(columns or schema.SHARD.names)


def _footer(part: PartName, metadata: Mapping[str, str], key: str) -> PartFooter:
    try:
        named = PartName(int(metadata["attempt"]), int(metadata["lease"]), int(metadata["part"]))
        footer = PartFooter(
            name=part,
            writer=metadata["writer"],
            last=bool(json.loads(metadata["last"])),
            ordinals=tuple(json.loads(metadata["ordinals"])),
            returned=tuple(json.loads(metadata["returned"])),
            metadata=metadata,
        )
    except (KeyError, ValueError, TypeError) as error:
        raise DamagedShard(f"Parquet object {key} is not a part of a lease: {type(error).__name__} {error}.") from error
    if named != part:
        raise DamagedShard(f"Parquet object {key} says that it is {named}: it was moved or copied; restore it.")
    return footer


def _ordinals(table: pa.Table) -> list[int]:
    return [int(ordinal) for ordinal in np.unique(table.column("ordinal").to_numpy())]


def _without(table: pa.Table, ordinals: frozenset[int]) -> pa.Table:
    if ordinals.isdisjoint(_ordinals(table)):
        return table
    kept = ~np.isin(table.column("ordinal").to_numpy(), sorted(ordinals))
    return table.filter(pa.array(kept))


def _named(table: pa.Table, name: PartName) -> pa.Table:
    for column, value in (("attempt", name.attempt), ("lease", name.lease), ("part", name.part)):
        field = schema.SHARD.field(column)
        values = pa.repeat(pa.scalar(value, field.type), table.num_rows)
        if column in table.column_names:
            table = table.set_column(table.column_names.index(column), field, values)
        else:
            table = table.append_column(field, values)
    return table
