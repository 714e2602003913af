"""The leases and the decisions of one ordinal, found without reading the history of the run.

Contract: both searches begin at the first step in which the ordinal can have been open, and end with its terminal
decision or with the attempt, so they cost O(log steps) to begin and then what the window holds, unless the ordinal
stayed open for longer.

Why they miss nothing. New ordinals are leased in ascending order and at most `window.most_open` are open, so when an
ordinal is leased, all but so many of those up to it are settled; the totals in the ledger's footers, which never
decrease, tell the first step for which that is true. At the dispatch of a lease with version v at most
(v + 1) × every_steps steps are done, and the stamps of an attempt's leases never decrease.
"""

from bisect import bisect_left
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow.compute as pc

from grpo_core.schedule.window import Window
from grpo_core.trajectory import Stamp
from storage import layout, schema
from storage.attempts import read_attempt
from storage.layout import LedgerName
from storage.leases import LeaseRecord, newest_leases, read_lease
from storage.ledger import DROPPED, TRAINED, read_ledger_footer
from storage.objects import PARALLEL_REQUESTS, ObjectStore


def first_step(store: ObjectStore, attempt: int, ordinal: int, window: Window) -> int:
    """The first step of an attempt before whose end the ordinal can have been leased; one after its last if none."""
    parent = read_attempt(store, attempt).parent
    first = 1 if parent is None else parent[1] + 1

    def settled(step: int) -> int:
        return read_ledger_footer(store, LedgerName(attempt, step)).totals.settled

    steps = range(first, _last_step(store, attempt, first) + 1)
    return first + bisect_left(steps, ordinal + 1 - window.most_open, key=settled)


def decisions(store: ObjectStore, attempt: int, ordinal: int, first: int) -> list[dict[str, Any]]:
    """The ledger rows of an attempt about the ordinal from step `first` on, in order, up to the terminal one."""
    found: list[dict[str, Any]] = []
    for directory in store.directories(layout.ledger_prefix(attempt)):
        if directory < layout.ledger_directory(attempt, first):
            continue
        names = (layout.parse_ledger(key) for key in store.list(directory))
        chosen = (name for name in names if name is not None and name.step >= first)
        for name in sorted(chosen, key=lambda name: name.written_order):
            found += _rows(store, name, ordinal)
            if found and found[-1]["state"] in (TRAINED, DROPPED):
                return found
    return found


def leases(
    store: ObjectStore, attempt: int, ordinal: int, first: int, window: Window, *, last: int | None = None
) -> list[LeaseRecord]:
    """The attempt's leases of an ordinal that step `first` or a later one may train, ascending, up to number `last`."""
    every = window.every_steps
    oldest = (first - 1) // every - 1

    def version(lease: int) -> int:
        return Stamp.parse(read_lease(store, attempt, lease).stamp).version

    end = 1 + (next(newest_leases(store, attempt), -1) if last is None else last)
    begin = bisect_left(range(end), oldest, key=version)
    with ThreadPoolExecutor(PARALLEL_REQUESTS) as readers:
        records = list(readers.map(lambda number: read_lease(store, attempt, number), range(begin, end)))
    return [record for record in records if ordinal in record.ordinals]


def _rows(store: ObjectStore, name: LedgerName, ordinal: int) -> Iterator[dict[str, Any]]:
    """What one ledger file says about the ordinal. All columns are decoded only where it says anything."""
    key = layout.ledger(name)
    data = store.get(key)
    ordinals, _ = schema.decode(data, ["ordinal"], name=key)
    if pc.any(pc.equal(ordinals.column("ordinal"), ordinal)).as_py():
        yield from schema.decode(data, name=key)[0].filter(pc.field("ordinal") == ordinal).to_pylist()


def _last_step(store: ObjectStore, attempt: int, first: int) -> int:
    """The last step in the attempt's ledger, whose steps are dense from `first`; `first` − 1 before any."""
    for directory in reversed(store.directories(layout.ledger_prefix(attempt))):
        names = (layout.parse_ledger(key) for key in store.list(directory))
        steps = [name.step for name in names if name is not None and name.drops is None]
        if steps:
            return max(steps)
    return first - 1
