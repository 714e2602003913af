"""Which ordinals are generated next: the flow's side of the schedule, rebuilt from the store at every start.

Invariants: a lease record is durable before its task starts; the frontier here follows the trainer's ledger and the
parts of the leases, and decides nothing that is not in the store; the cost of an observation is that of what is new;
ordinals that were in flight whenever the flow died lately are tried apart from all others, until they have come to
something.
"""

import time
from collections.abc import Iterable
from dataclasses import replace

import pyarrow.compute as pc

from flows.inquest import Inquest
from grpo_core.prompts import Prompts
from grpo_core.schedule.frontier import Frontier, FrontierState, OrdinalState
from grpo_core.schedule.supply import Supply
from grpo_core.schedule.suspects import Suspects
from grpo_core.schedule.window import Window
from grpo_core.trajectory import Stamp
from storage import layout
from storage.checkpoints import Manifest
from storage.layout import LedgerName
from storage.leases import LeaseRecord, write_lease
from storage.ledger import DROPPED, RETURNED, TRAINED, LedgerFooter, read_ledger_file
from storage.objects import ObjectStore
from storage.pool import RefitRecord, read_refit


class Leasing:
    """The leases of one attempt. `live` is the newest version that the whole pool carries, None before the first;
    `window_full` says whether the window had no room for another lease when one was last asked for."""

    def __init__(
        self,
        store: ObjectStore,
        attempt: int,
        window: Window,
        prompts: Prompts,
        parent: Manifest | None,
        *,
        keep_buffered: bool,
    ) -> None:
        self._store = store
        self._attempt = attempt
        self._window = window
        self._prompts = prompts
        self.frontier = Frontier()
        if parent is not None:
            self.frontier = Frontier.resume(FrontierState.from_json(parent.frontier), keep_buffered=keep_buffered)
        self.steps_done = 0 if parent is None else parent.step
        self._next_version = self.steps_done // window.every_steps
        self._next_lease = 0
        self._holder: dict[int, int] = {}  # ordinal in flight → its lease
        self._drops = 0
        self._supply = Supply.of(prompts_per_step=window.prompts_per_step, ceiling=window.most_open)
        self._suspects = Suspects()
        self.live: RefitRecord | None = None
        self.window_full = False
        self.newest: LedgerFooter | None = None

    def heed(self, inquest: Inquest) -> None:
        """Take over what earlier attempts learnt about ordinals that the checkpoint does not know of."""
        named = {*inquest.failure_counts, *inquest.suspects.ordinals}
        # What was first leased after the checkpoint is new to it; to be tried again it must count as given back.
        unknown = sorted(ordinal for ordinal in named if self.frontier.state(ordinal) is OrdinalState.NEW)
        self.frontier.leased(unknown)
        self.frontier.returned(unknown)
        for ordinal, count in inquest.failure_counts.items():
            if self.frontier.state(ordinal) is OrdinalState.RETURNED:
                self.frontier.set_failure_count(ordinal, max(count, self.frontier.failure_counts.get(ordinal, 0)))
        self._suspects = inquest.suspects

    def leasable(self, ordinal: int) -> bool:
        """Whether this ordinal is still to be leased, for the first time or again."""
        return self.frontier.state(ordinal) in (OrdinalState.NEW, OrdinalState.RETURNED)

    def observe(self) -> list[LedgerFooter]:
        """Take in what the trainer has ledgered and which version is live; the footers of the steps that are new."""
        steps = []
        while (footer := self._next_ledger()) is not None:
            self.newest = footer
            if footer.name.drops is None:
                steps.append(footer)
                self._supply = self._supply.after_step(
                    ready=int(footer.metrics.get("ready_groups") or 0), wanted=self._window.prompts_per_step
                )
        while (record := read_refit(self._store, self._attempt, self._next_version)) is not None:
            self.live = record
            self._next_version += 1
        return steps

    def _next_ledger(self) -> LedgerFooter | None:
        """Apply the next ledger file, if it is there. Drops of a step come before the step, so they are looked for
        last: a step that is there has all of its drops there."""
        step = self.steps_done + 1
        drops, whole = LedgerName(self._attempt, step, self._drops), LedgerName(self._attempt, step)
        done = self._store.exists(layout.ledger(whole))
        if self._store.exists(layout.ledger(drops)):
            self._drops += 1
            return self._apply(drops)
        if done:
            self._drops, self.steps_done = 0, step
            return self._apply(whole)
        return None

    def _apply(self, name: LedgerName) -> LedgerFooter:
        rows, footer = read_ledger_file(self._store, name, ["ordinal", "state", "reason"])
        ordinals = rows.column("ordinal").to_pylist()
        arrived = [ordinal for ordinal in ordinals if self.frontier.state(ordinal) is OrdinalState.IN_FLIGHT]
        self.frontier.buffered(arrived)
        for ordinal in arrived:
            self._holder.pop(ordinal, None)
        self.frontier.trained(rows.filter(pc.field("state") == TRAINED).column("ordinal").to_pylist(), name.step)
        self.frontier.returned(rows.filter(pc.field("state") == RETURNED).column("ordinal").to_pylist())
        dropped = rows.filter(pc.field("state") == DROPPED)
        for ordinal, reason in zip(
            dropped.column("ordinal").to_pylist(), dropped.column("reason").to_pylist(), strict=True
        ):
            self.frontier.dropped([ordinal], reason)
        return footer

    @property
    def last_step(self) -> int:
        """The last step of the run, as things stand."""
        self._learn_size()
        return self._window.last_step(done=self.steps_done, settled=self.frontier.counts().settled)

    def next_lease(self, size: int) -> LeaseRecord | None:
        """Write the record of the next lease, as large as `size` or the room; None while there is no room."""
        if self.live is None:
            return None
        leasable = self._leasable()
        room = self._window.room(
            self.frontier, live_version=self.live.version, done=self.steps_done, limit=self._supply.limit
        )
        self.window_full = room.groups == 0
        ordinals = self._choose(min(size, room.groups, leasable))
        if not ordinals:
            return None
        if room.target_step is not None:
            for ordinal in ordinals:
                self.frontier.set_target_step(ordinal, room.target_step)
        failures = self.frontier.failure_counts
        record = LeaseRecord(
            attempt=self._attempt,
            lease=self._next_lease,
            ordinals=ordinals,
            dispatched_at=time.time(),
            stamp=str(Stamp(self._attempt, self.live.version)),
            target_step=room.target_step,
            failure_counts={ordinal: failures[ordinal] for ordinal in ordinals if ordinal in failures},
        )
        write_lease(self._store, record)
        self._holder |= dict.fromkeys(ordinals, record.lease)
        self._next_lease += 1
        return record

    def _learn_size(self) -> None:
        """A stream has a size once it has ended, and from then on the window has an end."""
        if self._window.prompts is None and self._prompts.size is not None:
            self._window = replace(self._window, prompts=self._prompts.size)

    def _leasable(self) -> int:
        """How many ordinals there are prompts for. Asked before the window is,
        so that a stream which ends between the two bounds it."""
        frontier = self.frontier
        end = self._prompts.recorded(frontier.next_ordinal + self._window.most_open)
        self._learn_size()
        if end is None:
            return self._window.most_open
        given_back = len(frontier.members(OrdinalState.RETURNED)) + len(frontier.members(OrdinalState.NEW))
        return given_back + max(0, end - frontier.next_ordinal)

    def _choose(self, count: int) -> tuple[int, ...]:
        """Put up to `count` ordinals in flight: while there are suspects, some of them and nothing beside them."""
        returned = frozenset(self.frontier.members(OrdinalState.RETURNED))
        in_flight = frozenset(self.frontier.members(OrdinalState.IN_FLIGHT))
        self._suspects = self._suspects.among(returned | in_flight)
        tried = self._suspects.next(returned=returned, in_flight=in_flight, count=count)
        if tried is None:
            return tuple(self.frontier.lease(count))
        self.frontier.leased(tried)
        return tried

    @property
    def leased(self) -> bool:
        """Whether this attempt has leased anything yet."""
        return self._next_lease > 0

    def arrived(self, lease: int, ordinals: Iterable[int]) -> None:
        """Groups of these ordinals are durable in this lease."""
        self.frontier.buffered(self._released(lease, ordinals))

    def gave_back(self, lease: int, ordinals: Iterable[int], *, failed: bool) -> None:
        """A sealed lease gave these back without a group. `failed`: each of them has failed once more."""
        missing = self._released(lease, ordinals)
        for ordinal in missing if failed else ():
            self.frontier.set_failure_count(ordinal, self.frontier.failure_counts.get(ordinal, 0) + 1)
        self.frontier.returned(missing)

    def _released(self, lease: int, ordinals: Iterable[int]) -> list[int]:
        """Those of them that were in flight in this lease. The ledger may have said more about others meanwhile, and
        they may be in flight again, in another lease."""
        mine = [ordinal for ordinal in ordinals if self._holder.get(ordinal) == lease]
        for ordinal in mine:
            del self._holder[ordinal]
        return mine
