"""Transfer through the object store: the trainer publishes a version once, every engine fetches it by itself.

For engines that no fast network joins with the trainer, and for any number of them: the trainer's work does not grow
with the pool. Publishing and fetching happen while the engines still generate; they stand still for the loading alone.
An engine that joins late fetches the newest full version and the differences since. The trainer keeps the bytes of the
last published version in memory, because the next difference is made to them.

Imports no vLLM.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_core.refit import snapshot
from grpo_core.refit.control import EngineControl
from grpo_core.refit.delta import Bytes
from grpo_core.refit.digest import TensorEntry, raw_bytes, tensor_digest
from grpo_core.refit.transfer import TransferError, Weights
from grpo_core.trajectory import Stamp
from storage import weights as published
from storage.objects import ObjectStore
from storage.weights import PublishedWeights

POLL_SECONDS = 0.05
# The version before the newest may still be on its way to an engine.
KEPT_VERSIONS = 2
# What the engine's workers answer when they are asked how far they are (`store_worker.StagingExtension`).
STAGED = "forebay_staged"


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """How an engine opens the run's store, and where on its host it keeps the newest weights."""

    url: str
    options: Mapping[str, Any]
    client: str
    shelf: str


class StoreTransfer:
    """Transfer through `store`. Every `full_every`-th version is full, the others are differences to the one before."""

    concurrent = True

    def __init__(
        self, store: ObjectStore, address: StoreAddress, *, full_every: int, fence: Callable[[], None]
    ) -> None:
        self._store = store
        self._address = address
        self._full_every = full_every
        self._fence = fence
        self._stamp: Stamp | None = None
        self._held: dict[str, Bytes] = {}
        self._manifest: tuple[TensorEntry, ...] = ()
        self._published: list[PublishedWeights] = []
        self._ready: dict[str, Stamp] = {}

    def prepare(self, weights: Weights, stamp: Stamp) -> int:
        """Publish the version, once; the bytes it has in the store. Raise StorageError."""
        if stamp == self._stamp:
            return self._published[-1].bytes
        first = self._stamp is None
        manifest = tuple(
            entry if entry.digest else replace(entry, digest=tensor_digest(tensor))
            for entry, (_, tensor) in zip(weights.manifest, weights.tensors, strict=True)
        )
        base = self._base(manifest)
        with tempfile.TemporaryDirectory(prefix="forebay-weights-") as name:
            directory, tensors = Path(name), dict(weights.tensors)
            if base is None:
                snapshot.write_full(directory, tensors, manifest)
            else:
                snapshot.write_delta(directory, tensors, self._held, manifest)
            files = published.publish(
                self._store, stamp.attempt, stamp.version, directory, base=base, fence=self._fence
            )
        self._published.append(PublishedWeights(stamp.attempt, stamp.version, base, files))
        # A copy: the tensors may be the parameters themselves, which the next step changes.
        self._held = {name: raw_bytes(tensor).numpy().copy() for name, tensor in tensors.items()}
        self._stamp, self._manifest = stamp, manifest
        self._delete_surplus(stamp, first)
        return self._published[-1].bytes

    def is_open(self, engine: str) -> bool:
        return self._ready.get(engine) == self._stamp

    def open(self, engine: EngineControl, deadline_seconds: float) -> None:
        """Have the engine's workers fetch and verify the version in the background, and wait until they have."""
        assert self._stamp is not None
        deadline = time.monotonic() + deadline_seconds
        address = self._address
        info = {
            "url": address.url,
            "options": dict(address.options),
            "client": address.client,
            "shelf": address.shelf,
            "stamp": str(self._stamp),
            "timeout_seconds": deadline_seconds,
        }
        engine.init_transfer(info, deadline_seconds)
        while not self._fetched(engine, max(POLL_SECONDS, deadline - time.monotonic())):
            if time.monotonic() > deadline:
                raise TransferError(
                    f"engine {engine.name} did not fetch {self._stamp} from the store within {deadline_seconds:g} s"
                )
            time.sleep(POLL_SECONDS)
        self._ready[engine.name] = self._stamp

    def _fetched(self, engine: EngineControl, deadline_seconds: float) -> bool:
        """Whether every worker has the version. Raise TransferError with a worker's own words if one cannot get it."""
        answers = engine.call_workers(STAGED, deadline_seconds)
        for answer in answers:
            if not isinstance(answer, dict) or answer.get("stamp") != str(self._stamp):
                raise TransferError(
                    f"engine {engine.name} has a worker that fetches {answer!r} instead of {self._stamp}"
                )
            if answer.get("error") is not None:
                raise TransferError(f"engine {engine.name} cannot fetch {self._stamp}: {answer['error']}")
        return bool(answers) and all(answer.get("done") is True for answer in answers)

    def send(self, engine: EngineControl, weights: Weights, deadline_seconds: float) -> None:
        engine.update({"stamp": str(self._stamp)}, deadline_seconds)

    def close(self, engine: str) -> None:
        self._ready.pop(engine, None)

    def _base(self, manifest: tuple[TensorEntry, ...]) -> int | None:
        """The version to publish the difference to; None for a full one."""
        since_full = next((n for n, link in enumerate(reversed(self._published)) if link.base is None), None)
        if self._stamp is None or since_full is None or since_full + 1 >= self._full_every:
            return None
        shapes = [replace(entry, digest=None) for entry in manifest]
        return self._stamp.version if shapes == [replace(entry, digest=None) for entry in self._manifest] else None

    def _delete_surplus(self, stamp: Stamp, first: bool) -> None:
        if first:
            published.delete_attempts_before(self._store, stamp.attempt)
        for version in published.surplus(self._published, keep=KEPT_VERSIONS):
            published.delete(self._store, stamp.attempt, version)
            self._published = [link for link in self._published if link.version != version]
