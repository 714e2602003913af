"""The newest versions of the policy on an engine's host: fetched from the store once, shared by all workers there.

Invariants: a file is named by its version and by the digest of its manifest, and has that name only when every tensor's
digest was that of the manifest, so a file that is there is right, whichever run made it; one process fetches while the
others wait for its lock, which the kernel releases with the process; a version is fetched as the difference to one that
is on the shelf wherever the chain allows it. The newest two stay, so that the next difference finds its base and a file
that is being read keeps its name.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from grpo_core.refit import snapshot
from grpo_core.refit.digest import TensorEntry, check_digest
from grpo_core.refit.transfer import TransferError
from grpo_core.trajectory import Stamp
from storage import weights
from storage.objects import ObjectStore
from storage.weights import PublishedWeights

KEPT = 2
LOCK_POLL_SECONDS = 0.05
SUFFIX = ".safetensors"


def obtain(store: ObjectStore, stamp: Stamp, shelf: Path, *, deadline_seconds: float) -> Path:
    """The file of a version, with its manifest beside it (`manifest_of`). Raise StorageError, ManifestError, or
    TransferError when another process did not release the shelf in time."""
    shelf.mkdir(parents=True, exist_ok=True)
    with _locked(shelf, deadline_seconds):
        file = _place(shelf, weights.describe(store, stamp.attempt, stamp.version))
        if file.exists():
            os.utime(file)
        else:
            _fetch(store, stamp, shelf, file)
            _tidy(shelf)
    return file


def manifest_of(file: Path) -> tuple[TensorEntry, ...]:
    """The manifest of a file on the shelf."""
    return snapshot.read_manifest(file.with_suffix(".manifest"))


def _place(shelf: Path, version: PublishedWeights) -> Path:
    """Where a version stands on the shelf."""
    return shelf / f"{version.attempt}.{version.version}-{version.files[snapshot.MANIFEST].sha256[:16]}{SUFFIX}"


def _fetch(store: ObjectStore, stamp: Stamp, shelf: Path, file: Path) -> None:
    links = weights.chain(store, stamp.attempt, stamp.version, have=lambda link: _place(shelf, link).exists())
    base = links[0].base
    tensors: dict[str, torch.Tensor] = {}
    if base is not None:
        tensors = snapshot.read_tensors(_place(shelf, weights.describe(store, stamp.attempt, base)))
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=shelf) as name:
        for link in links:
            directory = Path(name) / str(link.version)
            directory.mkdir()
            weights.fetch(store, link.attempt, link.version, directory)
            tensors = snapshot.restore(directory, tensors)
        for entry in snapshot.read_manifest(directory):
            check_digest(entry, tensors[entry.name])
        made = Path(name) / file.name
        if (directory / snapshot.FULL).exists():
            os.replace(directory / snapshot.FULL, made)
        else:
            save_file(tensors, made)
        beside = file.with_suffix(".manifest")
        beside.mkdir(exist_ok=True)
        os.replace(directory / snapshot.MANIFEST, beside / snapshot.MANIFEST)
        os.replace(made, file)


def _tidy(shelf: Path) -> None:
    by_use = sorted(shelf.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
    for path in by_use[:-KEPT]:
        path.unlink()
        (path.with_suffix(".manifest") / snapshot.MANIFEST).unlink(missing_ok=True)
        path.with_suffix(".manifest").rmdir()


@contextmanager
def _locked(shelf: Path, deadline_seconds: float) -> Generator[None, None, None]:
    deadline = time.monotonic() + deadline_seconds
    with (shelf / "lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TransferError(
                        f"another process has been fetching weights into {shelf} for {deadline_seconds:g} s; look at "
                        "the other engines of this host"
                    ) from None
                time.sleep(LOCK_POLL_SECONDS)
        yield
