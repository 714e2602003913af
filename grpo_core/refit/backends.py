"""Which transfer a run uses, and where its engines find what it leaves them: the one place that knows all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from grpo_core.config import RunConfig
from grpo_core.refit.gloo import GlooTransfer
from grpo_core.refit.ipc import IpcTransfer
from grpo_core.refit.nccl import NcclTransfer
from grpo_core.refit.store import StoreAddress, StoreTransfer
from grpo_core.refit.transfer import Transfer
from storage.objects import ObjectStore

# vLLM's packed IPC buffer must hold the largest tensor, which is the embedding.
IPC_BUFFER_BYTES = 2 << 30


def transfer_of(config: RunConfig, store: ObjectStore, *, fence: Callable[[], None]) -> Transfer:
    """The transfer that `refit.backend` names. `fence` raises when a newer attempt owns the run."""
    match config.refit.backend:
        case "gloo":
            return GlooTransfer()
        case "nccl":
            return NcclTransfer()
        case "ipc":
            return IpcTransfer(IPC_BUFFER_BYTES)
        case "store":
            return StoreTransfer(store, store_address(config, store), full_every=config.refit.full_every, fence=fence)


def store_address(config: RunConfig, store: ObjectStore) -> StoreAddress:
    """The run's store as an engine opens it: a local one by its absolute path,
    since engines have their own directory."""
    return StoreAddress(
        url=_url(store),
        options=config.storage.options,
        client=config.storage.client,
        shelf=str(config.model.cache_directory.expanduser() / "weights" / _name_of_run(config, store)),
    )


def adapter_directory(config: RunConfig, store: ObjectStore) -> Path:
    """Where this run keeps its adapters, for the trainer and for every engine."""
    parent = config.refit.adapter_directory or config.model.cache_directory / "adapters"
    return parent.expanduser().absolute() / _name_of_run(config, store)


def _name_of_run(config: RunConfig, store: ObjectStore) -> str:
    """A name that runs of the same id in other stores do not have."""
    return f"{config.run_id}-{hashlib.sha256(_url(store).encode()).hexdigest()[:8]}"


def _url(store: ObjectStore) -> str:
    local = store.local_path("")
    return store.url if local is None else str(local)
