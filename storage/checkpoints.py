"""Checkpoints: directories of files that a MANIFEST, written last and once, makes real.

The manifest is the atomic commit of everything a resumed trainer relies on: the digests of the files, the version, the
frontier, the schedule, and the buffered parts it pins. A directory without one is an interrupted save and is never
read. A damaged checkpoint is skipped with a report, never silently; when every one is damaged the run fails, because
starting again at step 0 would throw a run away without asking.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from storage import layout
from storage.digests import FileDigest, check_files, digests_from, fields_of
from storage.errors import DamagedCheckpoint, DamagedRecord, InvalidKey, NoValidCheckpoint, ObjectMissing
from storage.layout import CheckpointName, PartName
from storage.objects import PARALLEL_REQUESTS, ObjectStore
from storage.records import read_record, write_record


@dataclass(frozen=True, slots=True)
class Manifest:
    """`frontier` is the FrontierState and `extra` the schedule, both as JSON; `created_at` is in Unix seconds.

    `pinned` are the parts that hold the buffered groups a resume relies on; finite `metrics` rank for retention.
    """

    attempt: int
    step: int
    version: int
    files: Mapping[str, FileDigest]
    frontier: Mapping[str, Any]
    created_at: float
    pinned: tuple[PartName, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> CheckpointName:
        return CheckpointName(self.attempt, self.step)


def commit_manifest(store: ObjectStore, manifest: Manifest, *, fence: Callable[[], None] | None = None) -> None:
    """Make the checkpoint real. Its files must be in the store already: DamagedCheckpoint if one is not.

    Raise Fenced when a newer attempt owns the run, or another process committed this step.
    """
    check_files(store, layout.checkpoint(manifest.attempt, manifest.step), manifest.files, contents=False)
    fields = {
        "attempt": manifest.attempt,
        "step": manifest.step,
        "version": manifest.version,
        "files": fields_of(manifest.files),
        "frontier": dict(manifest.frontier),
        "created_at": manifest.created_at,
        "pinned": [[part.attempt, part.lease, part.part] for part in sorted(manifest.pinned)],
        "metrics": {name: value for name, value in manifest.metrics.items() if math.isfinite(value)},
        "extra": dict(manifest.extra),
    }
    if fence is not None:
        fence()
    write_record(store, layout.manifest(manifest.attempt, manifest.step), fields)


def read_manifest(store: ObjectStore, attempt: int, step: int) -> Manifest:
    """Raise ObjectMissing when there is no such checkpoint, DamagedCheckpoint when its manifest is altered."""
    key = layout.manifest(attempt, step)
    try:
        fields = read_record(store, key)
        fields["files"] = digests_from(fields["files"])
        fields["pinned"] = tuple(PartName(*part) for part in fields["pinned"])
        manifest = Manifest(**fields)
    except (DamagedRecord, InvalidKey, KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedCheckpoint(f"Manifest {key} cannot be used: {error}") from error
    if manifest.name != CheckpointName(attempt, step):
        raise DamagedCheckpoint(f"Manifest {key} says that it is {manifest.name}: it was moved or copied.")
    return manifest


def verify(store: ObjectStore, attempt: int, step: int) -> Manifest:
    """Read every byte of a checkpoint. Raise ObjectMissing when there is none, DamagedCheckpoint when it is altered."""
    manifest = read_manifest(store, attempt, step)
    check_files(store, layout.checkpoint(attempt, step), manifest.files)
    return manifest


def committed(store: ObjectStore) -> list[CheckpointName]:
    """Checkpoints that have a manifest, oldest first by attempt, then step."""
    names = []
    for attempt in store.directories(layout.checkpoints_prefix()):
        for directory in store.directories(attempt):
            name = layout.parse_checkpoint(directory)
            if name is not None and store.exists(layout.manifest(name.attempt, name.step)):
                names.append(name)
    return sorted(names)


def readable(store: ObjectStore, *, on_damaged: Callable[[CheckpointName, DamagedCheckpoint], None]) -> list[Manifest]:
    """The manifests that can be read, oldest first; `on_damaged` hears of the others. No file is looked at."""
    manifests = []
    for name in committed(store):
        try:
            manifests.append(read_manifest(store, name.attempt, name.step))
        except DamagedCheckpoint as error:
            on_damaged(name, error)
        except ObjectMissing:
            continue  # deleted between listing and reading
    return manifests


def newest_valid(
    store: ObjectStore, *, on_damaged: Callable[[CheckpointName, DamagedCheckpoint], None]
) -> Manifest | None:
    """The intact checkpoint of the highest attempt, then step; None when the run has none at all.

    One whose pinned parts are not all there cannot be resumed from, so it counts as damaged. `on_damaged` hears of
    every one that is skipped. Raise NoValidCheckpoint when there are some but none is intact.
    """
    names = committed(store)
    for name in reversed(names):
        try:
            manifest = verify(store, name.attempt, name.step)
            _check_pinned(store, manifest)
            return manifest
        except DamagedCheckpoint as error:
            on_damaged(name, error)
        except ObjectMissing:
            continue  # retention deleted it between listing and reading; a kept one is older or newer
    if names:
        raise NoValidCheckpoint(
            f"None of the {len(names)} checkpoints in {store.url} is intact: restore one of them, "
            "or start a new run under another run id."
        )
    return None


def _check_pinned(store: ObjectStore, manifest: Manifest) -> None:
    """Raise DamagedCheckpoint naming a pinned part that is not in the store.

    A writer that was stopped in the middle of committing may commit a checkpoint long after a newer attempt made it a
    dead branch and its parts were collected.
    """
    keys = [layout.part(part.attempt, part.lease, part.part) for part in manifest.pinned]
    with ThreadPoolExecutor(PARALLEL_REQUESTS) as askers:
        for key, exists in zip(keys, askers.map(store.exists, keys), strict=True):
            if not exists:
                raise DamagedCheckpoint(
                    f"Part {key}, which holds buffered groups of checkpoint {manifest.attempt}/{manifest.step}, is "
                    "missing: the checkpoint cannot be resumed from."
                )


def to_delete(
    manifests: Iterable[Manifest],
    *,
    keep_last: int,
    keep_best: int = 0,
    metric: str | None = None,
    higher_is_better: bool = True,
    protected: Iterable[CheckpointName] = (),
) -> list[CheckpointName]:
    """Which checkpoints retention no longer needs: all but the newest, the best by `metric`, and the protected ones.

    Protect what somebody may be about to resume from. Of equal metrics the newer counts as better; one without it is
    never best.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}: at least the newest checkpoint must stay.")
    ordered = sorted(manifests, key=lambda manifest: manifest.name)
    kept = {manifest.name for manifest in ordered[-keep_last:]} | set(protected)
    if keep_best and metric is not None:
        sign = 1.0 if higher_is_better else -1.0
        ranked = [manifest for manifest in ordered if metric in manifest.metrics]
        ranked.sort(key=lambda manifest: (sign * manifest.metrics[metric], manifest.name))
        kept |= {manifest.name for manifest in ranked[-keep_best:]}
    return [manifest.name for manifest in ordered if manifest.name not in kept]


def delete(store: ObjectStore, attempt: int, step: int) -> None:
    """Delete the manifest first, so that an interrupted deletion leaves no checkpoint, rather than half of one."""
    store.delete(layout.manifest(attempt, step))
    store.delete_prefix(layout.checkpoint(attempt, step))


def discard(store: ObjectStore, attempt: int, step: int) -> None:
    """Delete what a failed save of this attempt left, unless its manifest made it a checkpoint after all."""
    if not store.exists(layout.manifest(attempt, step)):
        store.delete_prefix(layout.checkpoint(attempt, step))
