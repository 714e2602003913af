"""Checkpoints behind the step loop, which stops only while they are copied into host memory.

    copy → files → digests → upload → MANIFEST → retention

Everything after the copy happens in a thread of each rank. Invariants: a checkpoint is the state at its copy, whatever
later steps do. One save is in flight at most: the next one waits for it, and so does the end of the loop. The ranks
talk over a process group of their own, so these collectives never meet those of a step. What one rank fails with,
every rank raises, in the loop's thread and at its next command at the latest; what a failed save had written is
removed, and older checkpoints stay as they are. The fence is checked before the manifest and before each deletion.
"""

from __future__ import annotations

import errno
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from concurrent import futures
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh

from grpo_core.background import call_in_background
from grpo_core.config import RunConfig
from grpo_core.evaluation import with_evaluation_metric
from grpo_core.metrics import EVALUATION_PREFIX
from grpo_core.training import checkpoint
from grpo_core.training.checkpoint import HostCopy
from grpo_core.training.commands import Save
from grpo_core.training.model import Policy
from storage import layout
from storage.attempts import Fence, read_attempt
from storage.checkpoints import Manifest, commit_manifest, delete, discard, readable, to_delete
from storage.digests import digest_directory, digests_from, fields_of
from storage.errors import DamagedCheckpoint, StorageError, StoreFull
from storage.layout import CheckpointName, PartName
from storage.objects import ObjectStore

Answer = TypeVar("Answer")

# A loop that failed gives the save in flight this long to end: what was copied before the failure is worth keeping.
LAST_SAVE_SECONDS = 60.0


class SaveFailed(RuntimeError):
    """A save did not come to its end; the message names its step and the cause."""


class Saving:
    """One rank's saves; made by all ranks together. As a context it waits, at its end, for the save in flight."""

    def __init__(
        self,
        config: RunConfig,
        store: ObjectStore,
        attempt: int,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
    ) -> None:
        self._config = config
        self._settings = config.checkpointing
        self._limit = config.training.step_timeout_seconds
        self._store = store
        self._attempt = attempt
        self._policy = policy
        self._optimizer = optimizer
        self._device = device
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._limit))
        self._mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self._copy: HostCopy | None = None
        self._step = -1
        self._running: futures.Future[float] | None = None
        self._finished: dict[str, float] = {}

    def __enter__(self) -> Saving:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.wait()
            return
        try:
            self.wait(LAST_SAVE_SECONDS)
        except SaveFailed as also:
            print(also, file=sys.stderr, flush=True)

    def start(self, command: Save) -> dict[str, float]:
        """Copy what `command` is to save, and begin to write it. Return what a ledger can say about saves: how long
        this one kept the loop, and how long the one before took as a whole."""
        began = time.monotonic()
        self.wait()
        tensors = checkpoint.tensors_of(self._policy, self._optimizer)
        if self._copy is None:
            self._copy = HostCopy(tensors, self._mesh)
        self._copy.fill(tensors)
        copied, randoms = self._copy.tensors, checkpoint.random_states()
        self._step = command.step
        self._running = call_in_background(lambda: self._write(command, copied, randoms, began), name="checkpoint")
        if not self._settings.async_save:
            self.wait()
        return {**self._finished, "checkpoint_blocked_seconds": time.monotonic() - began}

    def check(self) -> None:
        """Raise SaveFailed when the save that was in flight has failed."""
        if self._running is not None and self._running.done():
            self.wait()

    def wait(self, limit: float | None = None) -> None:
        """Wait until no save is in flight, `limit` (default: training.step_timeout_seconds) seconds at most. Raise
        SaveFailed when it fails or takes longer."""
        if self._running is None:
            return
        seconds = self._limit if limit is None else limit
        done, _ = futures.wait([self._running], seconds)
        if not done:
            raise SaveFailed(
                f"saving the checkpoint of step {self._step} kept the trainer waiting for {seconds:g} s; look at the store "
                f"{self._store.url}, or raise training.step_timeout_seconds"
            )
        running, self._running = self._running, None
        self._finished = {"checkpoint_seconds": running.result()}

    def _write(self, command: Save, tensors: Mapping[str, Tensor], randoms: dict[str, Any], began: float) -> float:
        """The part behind the loop; seconds since `began` at its end. Raise SaveFailed."""
        if self._device.type == "cuda":
            # A new thread would be on the first GPU, and open a context there.
            torch.cuda.set_device(self._device)
        prefix = layout.checkpoint(self._attempt, command.step)
        try:
            with ExitStack() as stack:
                directories = self._together(lambda: stack.enter_context(_directory(self._store, prefix)))
                directory = directories[dist.get_rank()]
                self._write_files(directory, tensors)
                written = self._together(lambda: (self._deliver(directory, prefix), randoms))
            self._together(lambda: self._commit(command, written) if dist.get_rank() == 0 else None)
        except SaveFailed:
            # Every rank knows, so none is writing any more.
            if dist.get_rank() == 0:
                self._discard(command.step)
            raise
        except Exception as error:
            raise SaveFailed(f"saving the checkpoint of step {command.step} failed: {_words(error)}") from error
        return time.monotonic() - began

    def _write_files(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        try:
            checkpoint.write(directory, tensors, group=self._group)
        except CheckpointException as error:
            rank, (cause, _) = min(error.failures.items())
            if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
                cause = StoreFull(f"No space left to write {directory}: free some space, then continue the run.")
            raise self._failed(rank, _words(cause)) from error

    def _deliver(self, directory: Path, prefix: str) -> dict[str, list[int | str]]:
        """Digests of this rank's files, which are in the store afterwards."""
        # What a store keeps is what was hashed here, before it left. All ranks share the directory of a local store.
        if self._store.local_path(prefix) is None:
            digests = fields_of(digest_directory(directory))
            self._store.upload(directory, prefix)
            return digests
        return fields_of(digest_directory(directory)) if dist.get_rank() == 0 else {}

    def _commit(self, command: Save, written: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        """Rank 0 makes the checkpoint real, and then those go that it replaces."""
        manifest = Manifest(
            attempt=self._attempt,
            step=command.step,
            version=command.facts["version"],
            files=digests_from({name: digest for files, _ in written for name, digest in files.items()}),
            frontier=command.facts["frontier"],
            created_at=time.time(),
            pinned=tuple(PartName(*part) for part in command.facts["pinned"]),
            metrics=command.facts["metrics"],
            extra={"random_states": [randoms for _, randoms in written]},
        )
        commit_manifest(self._store, manifest, fence=Fence(self._store, self._attempt).check)
        metric = self._settings.metric_name
        if self._settings.keep_top_k and metric not in manifest.metrics and not metric.startswith(EVALUATION_PREFIX):
            print(
                f"checkpoint {manifest.attempt}.{manifest.step} has no metric {metric!r} "
                f"(checkpointing.metric_name), so it is never one of the best; it has {', '.join(sorted(manifest.metrics))}",
                file=sys.stderr,
                flush=True,
            )
        retain(self._store, self._attempt, self._config)

    def _discard(self, step: int) -> None:
        try:
            discard(self._store, self._attempt, step)
        except StorageError as error:
            print(f"files of the failed checkpoint of step {step} are left: {error}", file=sys.stderr, flush=True)

    def _together(self, action: Callable[[], Answer]) -> list[Answer]:
        """What `action` returned on each rank, in rank order. Raise SaveFailed on all ranks when one failed."""
        answer: Answer | None = None
        failure = ""
        try:
            answer = action()
        except Exception as error:  # noqa: BLE001 - every rank raises it
            failure = _words(error)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (answer, failure), group=self._group)
        for rank, (_, words) in enumerate(gathered):
            if words:
                raise self._failed(rank, words)
        return [answer for answer, _ in gathered]

    def _failed(self, rank: int, words: str) -> SaveFailed:
        return SaveFailed(f"saving the checkpoint of step {self._step} failed on rank {rank}: {words}")


def retain(store: ObjectStore, attempt: int, config: RunConfig) -> None:
    """Delete the checkpoints that retention no longer needs; never the one that this attempt resumed from, nor a
    damaged one, which somebody may want to look at."""
    parent, settings = read_attempt(store, attempt).parent, config.checkpointing
    surplus = to_delete(
        with_evaluation_metric(store, readable(store, on_damaged=_say_damaged), config),
        keep_last=settings.keep_last,
        keep_best=settings.keep_top_k,
        metric=settings.metric_name,
        higher_is_better=settings.higher_is_better,
        protected=[] if parent is None else [CheckpointName(*parent)],
    )
    fence = Fence(store, attempt)
    for name in surplus:
        fence.check()
        delete(store, name.attempt, name.step)


def _say_damaged(name: CheckpointName, error: DamagedCheckpoint) -> None:
    print(f"checkpoint {name.attempt}.{name.step} is left where it is: {error}", file=sys.stderr, flush=True)


@contextmanager
def _directory(store: ObjectStore, prefix: str) -> Generator[Path, None, None]:
    """A local directory for what ends below `prefix`: the store's own, or one that lasts until it is uploaded."""
    local = store.local_path(prefix)
    if local is not None:
        local.mkdir(parents=True, exist_ok=True)
        yield local
        return
    with tempfile.TemporaryDirectory(prefix="forebay-checkpoint-") as name:
        yield Path(name)


def _words(error: BaseException) -> str:
    """Type and first line of an error."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
