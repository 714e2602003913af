"""Transfer through CUDA IPC: trainer and engine share one GPU and hand over memory handles, not bytes.

For a trainer of one process and engines on the same host and the same physical GPU. The handles travel as a
pickle over HTTP, written by this process and read by an engine that was told to trust it
(`VLLM_ALLOW_INSECURE_SERIALIZATION=1`), so the engine must listen on loopback only. The trainer must not use
`expandable_segments`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import torch

from grpo_core.config import LOOPBACK
from grpo_core.refit.control import EngineControl
from grpo_core.refit.links import HeldWeights, Links, PhaseClient, TrainerEngine
from grpo_core.refit.transfer import TransferError, Weights
from grpo_core.trajectory import Stamp

Encode = Callable[[dict[str, Any]], dict[str, Any]]


def handle_encoding() -> Encode:
    """How handles go over HTTP: encoded by vLLM itself, so what it reads is what it wrote. Imports vLLM."""
    from vllm.distributed.weight_transfer.clients import _json_safe_update_info

    return _json_safe_update_info


Connect = Callable[[int, PhaseClient, HeldWeights], TrainerEngine]


def connect_ipc(buffer_bytes: int, client: PhaseClient, source: HeldWeights) -> TrainerEngine:
    """A link over a packed staging buffer of `buffer_bytes`, at least the size of the largest tensor."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    info = IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=buffer_bytes)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)  # type: ignore[arg-type]


class IpcTransfer:
    """Transfer on one shared GPU. `buffer_bytes` bounds the staging memory and must hold the largest tensor."""

    concurrent = False

    def __init__(self, buffer_bytes: int, connect: Connect = connect_ipc) -> None:
        self._buffer_bytes = buffer_bytes
        self._connect = connect
        self._links = Links("check its log, and that both are on the same GPU")

    def prepare(self, weights: Weights, stamp: Stamp) -> int:
        return weights.bytes

    def is_open(self, engine: str) -> bool:
        return engine in self._links

    def open(self, engine: EngineControl, deadline_seconds: float) -> None:
        """Give the engine a link of its own. Raise TransferError where trainer and engine cannot share one GPU."""
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise TransferError(
                f"ipc serves a trainer of one process, not {torch.distributed.get_world_size()}; "
                "set refit.backend to nccl"
            )
        if urlsplit(engine.url).hostname not in LOOPBACK:
            raise TransferError(f"ipc needs an engine on loopback, not {engine.url}; start it with host 127.0.0.1")
        self._links.open(
            engine,
            PhaseClient(engine, deadline_seconds, handle_encoding()),
            lambda client, source: self._connect(self._buffer_bytes, client, source),
            deadline_seconds,
        )

    def send(self, engine: EngineControl, weights: Weights, deadline_seconds: float) -> None:
        """Let the engine read the weights where they lie. Raise TransferError."""
        largest = max(weights.tensors, key=lambda named: named[1].nbytes)
        if largest[1].nbytes > self._buffer_bytes:
            raise TransferError(
                f"tensor {largest[0]} of {largest[1].nbytes} bytes does not fit the ipc buffer of "
                f"{self._buffer_bytes}; enlarge the buffer"
            )
        self._links.send(engine, weights, deadline_seconds)

    def close(self, engine: str) -> None:
        self._links.close(engine)
