"""Where the open ordinals of a run stand, rebuilt from its store by somebody who only reads.

Contract: the newest intact checkpoint of the living attempt (or the one it resumed from) gives the frontier; the
ledger since then, the leases that can still be open and their parts say what happened after. An ordinal stands where
its newest event put it; events are ordered by (attempt of the lease, lease, leased < arrived < decided).

Invariant: the cost is that of the window and of the steps since the last checkpoint, whatever the length of the run.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from flows.run import RunRefused, recorded_window
from grpo_core import recipe
from grpo_core.config import RunConfig
from grpo_core.schedule.frontier import Frontier, FrontierState, OrdinalState
from grpo_core.schedule.window import Window
from storage import layout, schema
from storage.attempts import AttemptClaim, newest
from storage.checkpoints import Manifest, read_manifest
from storage.errors import DamagedCheckpoint, ObjectMissing
from storage.layout import LedgerName, PartName
from storage.leases import newest_leases, read_lease
from storage.ledger import DROPPED, RETURNED, TRAINED
from storage.objects import PARALLEL_REQUESTS, ObjectStore
from storage.records import read_record
from storage.trajectories import TrajectoryStore

LEASES_AT_ONCE = 16
LEASED, ARRIVED, DECIDED = range(3)
TERMINAL = (OrdinalState.TRAINED, OrdinalState.DROPPED, OrdinalState.SETTLED)

Order = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run as its store describes it: the config its newest attempt runs with, its window, and that attempt."""

    config: RunConfig
    window: Window
    claim: AttemptClaim | None


@dataclass(frozen=True, slots=True)
class OpenOrdinal:
    """An ordinal that is buffered, in flight or returned. `order` begins with the attempt and number of its lease;
    `part` holds its group, if one arrived; `reason` says why it was returned."""

    order: Order
    state: OrdinalState
    part: PartName | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Standing:
    """`cut` is the frontier of the checkpoint that a resume would start from; `open` is ascending by ordinal."""

    frontier: Frontier
    cut: int
    open: dict[int, OpenOrdinal]


@dataclass(frozen=True, slots=True)
class Decision:
    """One ledger row, as far as the frontier is concerned."""

    name: LedgerName
    ordinal: int
    state: str
    reason: str | None
    part: PartName

    @property
    def order(self) -> Order:
        return (self.part.attempt, self.part.lease, DECIDED)


def recorded_run(store: ObjectStore) -> RecordedRun:
    """Raise RunRefused when the store holds no run."""
    try:
        fields = read_record(store, layout.run())
    except ObjectMissing as error:
        raise RunRefused(f"there is no run in {store.url}; check the run id and --root") from error
    claim = newest(store)
    config = recipe.with_changes(
        recipe.parse(fields["config"], where=f"run.json of {store.url}"), claim.config_changes if claim else {}
    )
    return RecordedRun(config, recorded_window(config, store, fields["prompts"]), claim)


def standing(store: ObjectStore, run: RecordedRun) -> Standing:
    """Where every open ordinal of the living history stands now. Only reads."""
    if run.claim is None:
        return Standing(Frontier(), 0, {})
    attempt = run.claim.attempt
    base = _base(store, run.claim)
    frontier, events = Frontier(), {}
    if base is not None:
        # What a resume gave back stays given back; the living attempt's own buffer is where its checkpoint says.
        keep = base.attempt == attempt or run.config.checkpointing.load_replay_buffer
        frontier = Frontier.resume(FrontierState.from_json(base.frontier), keep_buffered=keep)
        events = _pinned(store, base, frontier.members(OrdinalState.BUFFERED))
    saved = base.step if base is not None else 0
    # What was returned shortly before the checkpoint may wait to be leased again, and its old part would look like a
    # buffered group. It waits no longer than steps can be trained from stock: returned ordinals are leased first.
    for decision in _decisions(store, attempt, after=max(0, saved - _reach(run.window))):
        if decision.name.step > saved:
            _decide(frontier, decision)
        if decision.state == RETURNED:
            event = OpenOrdinal(decision.order, OrdinalState.RETURNED, decision.part, decision.reason)
            _note(events, decision.ordinal, event)
    for ordinal, event in _leased(store, attempt, run.window, frontier, events):
        _note(events, ordinal, event)
    for ordinal, event in events.items():
        _bring(frontier, ordinal, event.state)
    ended = OpenOrdinal(
        (0, 0, LEASED), OrdinalState.RETURNED, reason=f"attempt {base.attempt if base else attempt} ended"
    )
    undecided = (OrdinalState.BUFFERED, OrdinalState.IN_FLIGHT, OrdinalState.RETURNED)
    members = [ordinal for state in undecided for ordinal in frontier.members(state)]
    return Standing(frontier, base.frontier["cut"] if base else 0, {o: events.get(o, ended) for o in sorted(members)})


def _note(events: dict[int, OpenOrdinal], ordinal: int, event: OpenOrdinal) -> None:
    """Keep the newest event of an ordinal."""
    if ordinal not in events or event.order > events[ordinal].order:
        events[ordinal] = event


def _reach(window: Window) -> int:
    """For how many steps everything that can be open at once would last."""
    return (window.max_age + 1) * window.every_steps


def _base(store: ObjectStore, claim: AttemptClaim) -> Manifest | None:
    """The newest intact checkpoint of the living attempt, else the one it resumed from."""
    directories = store.directories(layout.checkpoints_prefix(claim.attempt))
    names = [name for directory in directories if (name := layout.parse_checkpoint(directory))]
    places = [(name.attempt, name.step) for name in reversed(names)] + ([claim.parent] if claim.parent else [])
    for attempt, step in places:
        try:
            return read_manifest(store, attempt, step)
        except (ObjectMissing, DamagedCheckpoint):
            continue  # an interrupted save, or one that a resume would skip too; the ledger covers the steps since
    return None


def _pinned(store: ObjectStore, base: Manifest, buffered: list[int]) -> dict[int, OpenOrdinal]:
    """The buffered groups that the checkpoint relies on."""
    trajectories = TrajectoryStore(store, base.attempt)
    with ThreadPoolExecutor(PARALLEL_REQUESTS) as readers:
        footers = list(readers.map(trajectories.read_footer, base.pinned))
    held = set(buffered)
    return {
        ordinal: OpenOrdinal((footer.name.attempt, footer.name.lease, ARRIVED), OrdinalState.BUFFERED, footer.name)
        for footer in sorted(footers, key=lambda footer: footer.name)
        for ordinal in held.intersection(footer.ordinals)
    }


def _decisions(store: ObjectStore, attempt: int, *, after: int) -> Iterator[Decision]:
    """What the attempt's ledger says after step `after`, in the order it was written."""
    first = layout.ledger_directory(attempt, after + 1)
    directories = [each for each in store.directories(layout.ledger_prefix(attempt)) if each >= first]
    names = (layout.parse_ledger(key) for directory in directories for key in store.list(directory))
    for name in sorted((name for name in names if name and name.step > after), key=lambda name: name.written_order):
        yield from read_decisions(store, name)


def read_decisions(store: ObjectStore, name: LedgerName) -> list[Decision]:
    """The rows of one ledger file."""
    key = layout.ledger(name)
    rows, _ = schema.decode(store.get(key), ["ordinal", "state", "reason", "lease_attempt", "lease", "part"], name=key)
    return [
        Decision(
            name, row["ordinal"], row["state"], row["reason"], PartName(row["lease_attempt"], row["lease"], row["part"])
        )
        for row in rows.to_pylist()
    ]


def _leased(
    store: ObjectStore, attempt: int, window: Window, frontier: Frontier, events: dict[int, OpenOrdinal]
) -> Iterator[tuple[int, OpenOrdinal]]:
    """Events of the attempt's newest leases, back to where every open ordinal is accounted for.

    New ordinals are leased in ascending order and at most a window's worth is open, so among more distinct ordinals
    than that is the highest ever leased; below it, whatever the ledger does not explain has an older lease.
    """
    trajectories = TrajectoryStore(store, attempt)
    most_open = _reach(window) * window.prompts_per_step
    explained = {ordinal for ordinal, event in events.items() if event.state is OrdinalState.BUFFERED}
    seen: set[int] = set()
    newest_first = newest_leases(store, attempt)
    with ThreadPoolExecutor(PARALLEL_REQUESTS) as readers:
        while chosen := list(islice(newest_first, LEASES_AT_ONCE)):
            records = list(readers.map(lambda number: read_lease(store, attempt, number), chosen))
            for record in records:
                seen.update(record.ordinals)
                yield from (
                    (o, OpenOrdinal((attempt, record.lease, LEASED), OrdinalState.IN_FLIGHT)) for o in record.ordinals
                )
            # A lease of terminal ordinals only has nothing more to say.
            alive = [r.lease for r in records if any(frontier.state(o) not in TERMINAL for o in r.ordinals)]
            for footer in readers.map(trajectories.read_footer, trajectories.open_parts(alive)):
                order = (attempt, footer.name.lease, ARRIVED)
                yield from ((o, OpenOrdinal(order, OrdinalState.BUFFERED, footer.name)) for o in footer.ordinals)
                yield from ((o, OpenOrdinal(order, OrdinalState.RETURNED, reason="expired")) for o in footer.returned)
            known = range(frontier.frontier, max(frontier.next_ordinal, max(seen, default=-1) + 1))
            if len(seen) > most_open and all(
                o in seen or o in explained or frontier.state(o) in TERMINAL for o in known
            ):
                return


def _decide(frontier: Frontier, decision: Decision) -> None:
    """Apply one ledger row, whatever was known of the ordinal before."""
    ordinal = decision.ordinal
    _bring(frontier, ordinal, OrdinalState.BUFFERED)
    if decision.state == TRAINED:
        frontier.trained([ordinal], decision.name.step)
    elif decision.state == DROPPED:
        frontier.dropped([ordinal], decision.reason or "unknown")
    else:
        frontier.returned([ordinal])


def _bring(frontier: Frontier, ordinal: int, state: OrdinalState) -> None:
    """Move an ordinal to an open state along legal moves; a terminal one stays."""
    now = frontier.state(ordinal)
    if now is state or now in TERMINAL:
        return
    if now is OrdinalState.BUFFERED:
        frontier.returned([ordinal])
        now = OrdinalState.RETURNED
    if state is not now:
        if now is not OrdinalState.IN_FLIGHT:
            frontier.leased([ordinal])
        if state is OrdinalState.BUFFERED:
            frontier.buffered([ordinal])
        elif state is OrdinalState.RETURNED:
            frontier.returned([ordinal])
