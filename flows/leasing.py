"""Which ordinals are generated next: the flow's side of the schedule, rebuilt from the store at every start.

Invariants: a lease record is durable before its task starts; the frontier here follows the trainer's ledger and the
parts of the leases, and decides nothing that is not in the store; the cost of an observation is that of what is new.
"""

import time

import pyarrow.compute as pc

from grpo_core.schedule.frontier import Frontier, FrontierState, OrdinalState
from grpo_core.schedule.window import Window
from grpo_core.trajectory import Stamp
from storage import layout, schema
from storage.checkpoints import Manifest
from storage.layout import LedgerName
from storage.leases import LeaseRecord, write_lease
from storage.ledger import DROPPED, RETURNED, TRAINED, LedgerFooter, read_ledger_footer
from storage.objects import ObjectStore
from storage.pool import RefitRecord, read_refit


class Leasing:
    """The leases of one attempt. `live` is the newest version that the whole pool carries, None before the first."""

    def __init__(
        self, store: ObjectStore, attempt: int, window: Window, parent: Manifest | None, *, keep_buffered: bool
    ) -> None:
        self._store = store
        self._attempt = attempt
        self._window = window
        self.frontier = Frontier()
        if parent is not None:
            self.frontier = Frontier.resume(FrontierState.from_json(parent.frontier), keep_buffered=keep_buffered)
        self.steps_done = 0 if parent is None else parent.step
        self._next_version = self.steps_done // window.every_steps
        self._next_lease = 0
        self._drops = 0
        self.live: RefitRecord | None = None
        self.newest: LedgerFooter | None = None

    def observe(self) -> list[LedgerFooter]:
        """Take in what the trainer has ledgered and which version is live; the footers of the steps that are new."""
        steps = []
        while (footer := self._next_ledger()) is not None:
            self.newest = footer
            if footer.name.drops is None:
                steps.append(footer)
        while (record := read_refit(self._store, self._attempt, self._next_version)) is not None:
            self.live = record
            self._next_version += 1
        return steps

    def _next_ledger(self) -> LedgerFooter | None:
        """Apply the next ledger file, if it is there. Drops of a step come before the step."""
        step = self.steps_done + 1
        for name in (LedgerName(self._attempt, step, self._drops), LedgerName(self._attempt, step)):
            if self._store.exists(layout.ledger(name)):
                self._apply(name)
                self._drops = 0 if name.drops is None else self._drops + 1
                self.steps_done = step if name.drops is None else self.steps_done
                return read_ledger_footer(self._store, name)
        return None

    def _apply(self, name: LedgerName) -> None:
        key = layout.ledger(name)
        rows, _ = schema.decode(self._store.get(key), ["ordinal", "state", "reason"], name=key)
        ordinals = rows.column("ordinal").to_pylist()
        arrived = [ordinal for ordinal in ordinals if self.frontier.state(ordinal) is OrdinalState.IN_FLIGHT]
        self.frontier.buffered(arrived)
        self.frontier.trained(rows.filter(pc.field("state") == TRAINED).column("ordinal").to_pylist(), name.step)
        self.frontier.returned(rows.filter(pc.field("state") == RETURNED).column("ordinal").to_pylist())
        dropped = rows.filter(pc.field("state") == DROPPED)
        for ordinal, reason in zip(
            dropped.column("ordinal").to_pylist(), dropped.column("reason").to_pylist(), strict=True
        ):
            self.frontier.dropped([ordinal], reason)

    def next_lease(self, size: int) -> LeaseRecord | None:
        """Write the record of the next lease, as large as `size` or the room; None while the window has no room."""
        if self.live is None:
            return None
        counts = self.frontier.counts()
        room = self._window.capacity(
            live_version=self.live.version, steps_done=self.steps_done, open_ordinals=counts.in_flight + counts.buffered
        )
        if room < 1:
            return None
        ordinals = tuple(self.frontier.lease(min(size, room)))
        failures = self.frontier.failure_counts
        record = LeaseRecord(
            attempt=self._attempt,
            lease=self._next_lease,
            ordinals=ordinals,
            dispatched_at=time.time(),
            stamp=str(Stamp(self._attempt, self.live.version)),
            failure_counts={ordinal: failures[ordinal] for ordinal in ordinals if ordinal in failures},
        )
        write_lease(self._store, record)
        self._next_lease += 1
        return record

    @property
    def leased(self) -> bool:
        """Whether this attempt has leased anything yet."""
        return self._next_lease > 0

    def arrived(self, ordinals: tuple[int, ...]) -> None:
        """Groups of these ordinals are durable; the ledger may already have said more about them."""
        self.frontier.buffered(
            [ordinal for ordinal in ordinals if self.frontier.state(ordinal) is OrdinalState.IN_FLIGHT]
        )

    def failed(self, ordinals: tuple[int, ...]) -> None:
        """A sealed lease gave these back without a group: each has failed once more."""
        for ordinal in ordinals:
            self.frontier.set_failure_count(ordinal, self.frontier.failure_counts.get(ordinal, 0) + 1)
        self.frontier.returned(ordinals)
