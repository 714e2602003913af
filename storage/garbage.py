"""What a store holds that nobody can need any more, and its deletion.

Records (claims, leases, refits, pool changes, evaluations, the ledger) are the history that `trace`, `ledger` and
`report` tell; they are small and never collected. Collected are, by these rules:

  * the parts of a lease, all together, that no committed manifest pins, when every ordinal of the lease is trained or
    dropped in the oldest checkpoint kept on the living chain (`settled`), or when the lease belongs to an older attempt
    and no ordinal of it had come to its end where that attempt left the living chain (`dead branch`);
  * checkpoints of the living chain that retention no longer needs; those of a dead branch, once the newest attempt has
    one of its own; and directories of files that never got their manifest (`interrupted save`);
  * weights of older attempts, and of versions below the newest published one.

All but settled parts must also be older than a grace time. What only the newest attempt can still be writing is left
to it: leases without their last part, and saves of steps above its newest checkpoint. While a manifest cannot be read,
no lease of its attempt or an older one is touched, for nobody knows what it pins;
the manifest itself is left to people.

Why this is safe beside a living run, and beside a resume. Terminal states are for ever along a chain, so an ordinal
that is terminal in checkpoint C is terminal in every checkpoint that descends from C, whenever that one commits. A
pinned part holds a buffered group, a part that waits to be trained an open ordinal, and neither is terminal. Hence,
with C the oldest kept checkpoint of the living chain:
  (1) what the living attempt still reads, and what a checkpoint that it commits between our listing and our deletion
      pins, is not settled in C; and it is no dead branch, because the living attempt writes only leases of its own and
      reads older ones only where its parent, which is never collected, pins them;
  (2) a resume from any committed checkpoint, whole or damaged, newest or oldest, on the living chain or off it, relies
      on the parts that this checkpoint pins and on no other, and all of them were read before anything was chosen;
  (3) a checkpoint that a stopped writer of a dead branch commits after our listing may pin what we delete; whoever
      resumes checks that pinned parts are there (`checkpoints.newest_valid`) and takes that checkpoint for damaged.
A claim after our listing may change the chain, so the fence is checked before each deletion. A deletion that is cut
short leaves a lease with its last part and a checkpoint without its manifest, which the next collection finishes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from storage import layout
from storage.attempts import Link, living_chain, read_attempt
from storage.checkpoints import Manifest, read_manifest, to_delete
from storage.errors import DamagedCheckpoint, DamagedRecord, DamagedShard, Fenced, ObjectMissing
from storage.layout import CheckpointName, LeaseName, VersionName
from storage.leases import read_lease
from storage.objects import PARALLEL_REQUESTS, Entry, ObjectStore
from storage.trajectories import TrajectoryStore

Kind = Literal["parts", "checkpoint", "weights"]
Name = TypeVar("Name", bound=Hashable)

# Longer than a lease lives, a save takes, or a clock is wrong.
GRACE_SECONDS = 2 * 3600.0


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints of the living chain stay: the newest, and the best by a metric."""

    keep_last: int
    keep_best: int
    metric: str
    higher_is_better: bool = True


@dataclass(frozen=True, slots=True)
class Garbage:
    """Something to delete: first `keys`, in their order, then all else below `directory`. `name` is that of a lease,
    a checkpoint or a version, as attempt/number."""

    kind: Kind
    name: str
    reason: str
    objects: int
    bytes: int
    keys: tuple[str, ...]
    directory: str | None = None


@dataclass(frozen=True, slots=True)
class Contents:
    """What collection needs to know of a store. `attempt` is the newest one, `parent` what it resumed from.

    `parts` are ordered by number; `ordinals` has the leases whose record can be read, `ended` those of the newest
    attempt that have their last part. `checkpoints` and `weights` map a directory to its files; `manifests` has the
    committed checkpoints, and `unreadable` those among them whose manifest says nothing.
    """

    attempt: int
    parent: CheckpointName | None
    chain: tuple[Link, ...]
    parts: Mapping[LeaseName, tuple[Entry, ...]]
    ordinals: Mapping[LeaseName, tuple[int, ...]]
    ended: frozenset[LeaseName]
    checkpoints: Mapping[CheckpointName, tuple[Entry, ...]]
    manifests: Mapping[CheckpointName, Manifest]
    unreadable: frozenset[CheckpointName]
    weights: Mapping[VersionName, tuple[Entry, ...]]

    def living(self, name: CheckpointName) -> bool:
        """Whether a checkpoint belongs to the living chain."""
        return any(link.contains(name.attempt, name.step) for link in self.chain)

    def oldest_kept(self) -> Manifest | None:
        """The oldest checkpoint on the living chain that says anything."""
        living = [name for name in self.manifests if self.living(name)]
        return self.manifests[min(living)] if living else None

    def departure(self, link: Link) -> Manifest | None:
        """The checkpoint with which an attempt left the living chain, if it did and the checkpoint is still there."""
        return None if link.last_step is None else self.manifests.get(CheckpointName(link.attempt, link.last_step))


def survey(store: ObjectStore) -> Contents | None:
    """Read what there is; None for a run that was never started. Costs in proportion to what is not collected yet."""
    chain = tuple(living_chain(store))
    if not chain:
        return None
    newest = chain[-1].attempt
    parent = read_attempt(store, newest).parent
    parts = _parts(store)
    own = [lease for lease in parts if lease.attempt == newest]
    directories = _directories(store, layout.checkpoints_prefix(), layout.parse_checkpoint)
    committed = {name for name, files in directories.items() if _committed(name, files)}
    manifests, unreadable = _manifests(store, committed)
    with ThreadPoolExecutor(PARALLEL_REQUESTS) as readers:
        ordinals = dict(zip(parts, readers.map(partial(_ordinals, store), parts), strict=True))
        ended = dict(zip(own, readers.map(lambda lease: _ended(store, parts[lease]), own), strict=True))
    return Contents(
        attempt=newest,
        parent=None if parent is None else CheckpointName(*parent),
        chain=chain,
        parts=parts,
        ordinals={lease: found for lease, found in ordinals.items() if found is not None},
        ended=frozenset(lease for lease, last in ended.items() if last),
        checkpoints={name: directories[name] for name in directories if name in manifests or name not in committed},
        manifests=manifests,
        unreadable=unreadable,
        weights=_directories(store, layout.weights_prefix(), layout.parse_weights),
    )


def select(
    contents: Contents, retention: Retention, *, now: float, grace_seconds: float = GRACE_SECONDS
) -> list[Garbage]:
    """What can go, by the rules above. `now` is in Unix seconds."""

    def old(entries: Iterable[Entry]) -> bool:
        return all(now - entry.written_at > grace_seconds for entry in entries)

    return [
        *_garbage_checkpoints(contents, retention, old),
        *_garbage_parts(contents, old),
        *_garbage_weights(contents, old),
    ]


def collect(store: ObjectStore, garbage: Iterable[Garbage], *, attempt: int) -> None:
    """Delete it. Raise Fenced when an attempt newer than `attempt`, the one of the survey, was claimed meanwhile."""
    with ThreadPoolExecutor(PARALLEL_REQUESTS) as deleters:
        for _ in deleters.map(partial(_delete, store, attempt), garbage):
            pass


def _delete(store: ObjectStore, attempt: int, item: Garbage) -> None:
    for key in item.keys:
        _check_claims(store, attempt)
        store.delete(key)
    if item.directory is not None:
        _check_claims(store, attempt)
        store.delete_prefix(item.directory)


def _check_claims(store: ObjectStore, attempt: int) -> None:
    if store.exists(layout.attempt(attempt + 1)):
        raise Fenced(
            f"Attempt {attempt + 1} of {store.url} was claimed while the garbage of attempt {attempt} was collected: "
            "collect again."
        )


def _garbage_checkpoints(
    contents: Contents, retention: Retention, old: Callable[[Iterable[Entry]], bool]
) -> Iterator[Garbage]:
    whole = {name for name in contents.manifests if _whole(contents, name)}
    surplus = to_delete(
        [contents.manifests[name] for name in whole if contents.living(name)],
        keep_last=retention.keep_last,
        keep_best=retention.keep_best,
        metric=retention.metric,
        higher_is_better=retention.higher_is_better,
        protected=[] if contents.parent is None else [contents.parent],
    )
    reasons = dict.fromkeys(surplus, "past retention")
    newest = max((name for name in contents.manifests if name.attempt == contents.attempt), default=None)
    writable = newest or CheckpointName(contents.attempt, -1)
    reasons |= {n: "interrupted save" for n in contents.checkpoints if n not in contents.manifests and n < writable}
    if newest in whole:
        dead = [name for name in contents.manifests if name < newest and not contents.living(name)]
        reasons |= dict.fromkeys(dead, "dead branch")
    for name, reason in sorted(reasons.items()):
        files = contents.checkpoints[name]
        if old(files):
            manifest = (layout.manifest(name.attempt, name.step),)
            directory = layout.checkpoint(name.attempt, name.step)
            yield _garbage("checkpoint", f"{name.attempt}/{name.step}", reason, files, manifest, directory)


def _garbage_parts(contents: Contents, old: Callable[[Iterable[Entry]], bool]) -> Iterator[Garbage]:
    pinned = {LeaseName(part.attempt, part.lease) for each in contents.manifests.values() for part in each.pinned}
    unknown = max((name.attempt for name in contents.unreadable), default=0)
    oldest = contents.oldest_kept()
    settled = _terminal(oldest)
    departed = {link.attempt: contents.departure(link) for link in contents.chain}
    for lease, entries in sorted(contents.parts.items()):
        ordinals = contents.ordinals.get(lease)
        if ordinals is None or lease in pinned or not unknown < lease.attempt <= contents.attempt:
            continue
        newest = lease.attempt == contents.attempt
        if oldest is not None and (not newest or lease in contents.ended) and all(map(settled, ordinals)):
            reason = f"settled in checkpoint {oldest.attempt}/{oldest.step}"
        elif old(entries) and _dead(lease, ordinals, departed):
            reason = "dead branch"
        else:
            continue
        keys = tuple(entry.key for entry in entries)
        yield _garbage("parts", f"{lease.attempt}/{lease.lease}", reason, entries, keys)


def _dead(lease: LeaseName, ordinals: Iterable[int], departed: Mapping[int, Manifest | None]) -> bool:
    """Whether a lease is of no use to the living chain, by the checkpoint with which each attempt of the chain left it:
    None for the newest, which has not, and where the checkpoint is gone; then the lease waits until it is settled."""
    if lease.attempt not in departed:
        return True
    manifest = departed[lease.attempt]
    return manifest is not None and not any(map(_terminal(manifest), ordinals))


def _garbage_weights(contents: Contents, old: Callable[[Iterable[Entry]], bool]) -> Iterator[Garbage]:
    published = [
        name
        for name, files in contents.weights.items()
        if layout.weights_digests(name.attempt, name.version) in {entry.key for entry in files}
    ]
    newest = max((name.version for name in published if name.attempt == contents.attempt), default=-1)
    for name, files in sorted(contents.weights.items()):
        superseded = name.attempt == contents.attempt and name.version < newest
        if (superseded or name.attempt < contents.attempt) and old(files):
            reason = "superseded" if superseded else "of an older attempt"
            digests = (layout.weights_digests(name.attempt, name.version),)
            directory = layout.weights(name.attempt, name.version)
            yield _garbage("weights", f"{name.attempt}/{name.version}", reason, files, digests, directory)


def _garbage(
    kind: Kind,
    name: str,
    reason: str,
    entries: tuple[Entry, ...],
    keys: tuple[str, ...],
    directory: str | None = None,
) -> Garbage:
    return Garbage(kind, name, reason, len(entries), sum(entry.bytes for entry in entries), keys, directory)


def _terminal(manifest: Manifest | None) -> Callable[[int], bool]:
    """Whether an ordinal is trained or dropped in a checkpoint; none is where there is no checkpoint."""
    if manifest is None:
        return lambda ordinal: False
    cut: int = manifest.frontier["cut"]
    above = {*manifest.frontier["trained_above_cut"], *manifest.frontier["dropped_above_cut"]}
    return lambda ordinal: ordinal < cut or ordinal in above


def _whole(contents: Contents, name: CheckpointName) -> bool:
    """Whether every file of a committed checkpoint is there with its size."""
    sizes = {entry.key: entry.bytes for entry in contents.checkpoints[name]}
    directory = layout.checkpoint(name.attempt, name.step)
    return all(sizes.get(directory + file) == digest.bytes for file, digest in contents.manifests[name].files.items())


def _committed(name: CheckpointName, files: Iterable[Entry]) -> bool:
    return layout.manifest(name.attempt, name.step) in {entry.key for entry in files}


def _parts(store: ObjectStore) -> dict[LeaseName, tuple[Entry, ...]]:
    """The parts of every lease that has any, in their order."""
    leases: dict[LeaseName, list[tuple[int, Entry]]] = {}
    for entry in store.entries(layout.trajectories_prefix()):
        if (name := layout.parse_part(entry.key)) is not None:
            leases.setdefault(LeaseName(name.attempt, name.lease), []).append((name.part, entry))
    return {lease: tuple(entry for _, entry in sorted(parts)) for lease, parts in leases.items()}


def _directories(store: ObjectStore, prefix: str, parse: Callable[[str], Name | None]) -> dict[Name, tuple[Entry, ...]]:
    """The objects below each `attempt/number/` directory of a prefix that `parse` has a name for."""
    found: dict[Name, list[Entry]] = {}
    for entry in store.entries(prefix):
        segments = entry.key.split("/")
        if (name := parse("/".join(segments[:3]) + "/")) is not None and len(segments) > 3:
            found.setdefault(name, []).append(entry)
    return {name: tuple(entries) for name, entries in found.items()}


def _manifests(
    store: ObjectStore, names: Iterable[CheckpointName]
) -> tuple[dict[CheckpointName, Manifest], frozenset[CheckpointName]]:
    """The manifests that can be read, and the checkpoints whose manifest cannot."""
    manifests, unreadable = {}, set()
    for name in names:
        try:
            manifests[name] = read_manifest(store, name.attempt, name.step)
        except DamagedCheckpoint:
            unreadable.add(name)
        except ObjectMissing:
            continue  # deleted by the trainer's own retention since it was listed
    return manifests, frozenset(unreadable)


def _ordinals(store: ObjectStore, lease: LeaseName) -> tuple[int, ...] | None:
    """What a lease was for; None when nobody can tell."""
    try:
        return read_lease(store, lease.attempt, lease.lease).ordinals
    except (ObjectMissing, DamagedRecord):
        return None


def _ended(store: ObjectStore, parts: Iterable[Entry]) -> bool:
    """Whether the highest of these parts is marked as the last of its lease."""
    *_, highest = (layout.parse_part(entry.key) for entry in parts)
    assert highest is not None
    try:
        return TrajectoryStore(store, highest.attempt).read_footer(highest).last
    except (ObjectMissing, DamagedShard):
        return False
