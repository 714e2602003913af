"""The engine's side of the gloo transfer. Imported only inside vLLM's worker processes.

An update is received whole and verified (manifest against the checkpoint the engine was started from, then
digests) before the model is opened for loading. So whatever fails on the way, the model still computes with
its old weights; only a failure while loading leaves it half-written. The price is a second copy of the
weights in host memory during an update.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from grpo_core.refit import loading
from grpo_core.refit.digest import TensorEntry, check_complete, check_digest, checkpoint_shapes
from grpo_core.refit.gloo import JOINED, READY, join_group


@dataclass
class GlooInit(WeightTransferInitInfo):
    """Where the trainer's store listens, and the size of the group: the trainer is rank 0, workers follow."""

    host: str
    port: int
    world_size: int
    timeout_seconds: float


@dataclass
class GlooUpdate(WeightTransferUpdateInfo):
    """One update: its number within the group, and its manifest in the order of the broadcasts."""

    number: int
    timeout_seconds: float
    manifest: list[dict[str, Any]] = field(default_factory=list)


class GlooWorkerEngine(WeightTransferEngine[GlooInit, GlooUpdate]):
    """vLLM's contract for a transfer engine, on a group of the trainer and this engine's workers."""

    init_info_cls = GlooInit
    update_info_cls = GlooUpdate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rank = 1 + self.parallel_config.data_parallel_index * self.parallel_config.world_size
        self._rank += self.parallel_config.rank
        self._store: TCPStore | None = None
        self._group: ProcessGroupGloo | None = None
        self._expected: dict[str, tuple[int, ...]] = {}

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        self.shutdown()
        self._expected = checkpoint_shapes(loading.checkpoint_directory(self.model_config))
        timeout = timedelta(seconds=init_info.timeout_seconds)
        self._store = TCPStore(init_info.host, init_info.port, is_master=False, timeout=timeout)
        self._store.set(f"{JOINED}/{self._rank}", "1")
        prefix = PrefixStore("group", self._store)
        self._group = join_group(prefix, self._rank, init_info.world_size, init_info.host, timeout)

    def start_weight_update(self) -> None:
        """Nothing yet: the model is opened for loading only when the whole update has arrived intact."""

    def receive_weights(self, update_info: GlooUpdate) -> None:
        """Take every tensor of the manifest from the group, check its digest and load it."""
        if self._group is None or self._store is None:
            raise RuntimeError("the gloo transfer group was never joined; call init_weight_transfer_engine first")
        manifest = [TensorEntry.from_json(entry) for entry in update_info.manifest]
        check_complete(manifest, self._expected)
        self._store.set(f"{READY}/{update_info.number}/{self._rank}", "1")
        timeout = timedelta(seconds=update_info.timeout_seconds)
        weights: list[tuple[str, torch.Tensor]] = []
        for entry in manifest:
            tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="cpu")
            raw = tensor.reshape(-1).view(torch.uint8)
            self._group.broadcast(raw, root=0, timeout=timeout).wait(timeout)  # type: ignore[attr-defined]
            weights.append((entry.name, tensor))
        for entry, (_, tensor) in zip(manifest, weights, strict=True):
            check_digest(entry, tensor)
        loading.load(self.model, weights)

    def finish_weight_update(self) -> None:
        loading.finish(self.model, self.model_config)

    def shutdown(self) -> None:
        self._group = None
        self._store = None
