"""Transfer with vLLM's own NCCL engine: one communicator per engine, the trainer's rank 0 and its workers.

Sends to different engines run one after the other: kernels of several communicators on one device may block each
other. Both sides need one libnccl, one GPU per rank, and the same NCCL settings.
"""

from __future__ import annotations

from collections.abc import Callable

from grpo_core.ports import free_port
from grpo_core.refit.control import EngineControl
from grpo_core.refit.links import HeldWeights, Links, PhaseClient, TrainerEngine
from grpo_core.refit.transfer import TransferError, Weights, trainer_address
from grpo_core.trajectory import Stamp

Connect = Callable[[str, int, int, PhaseClient, HeldWeights], TrainerEngine]


def connect_nccl(host: str, port: int, world_size: int, client: PhaseClient, source: HeldWeights) -> TrainerEngine:
    """Rendezvous with one engine through vLLM's factory. Raises TransferError when NCCL is not usable."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    info = NCCLTrainerInitInfo(
        rank=0, master_address=host, master_port=port, world_size=world_size, packed_buffer_size_bytes=256 << 20
    )
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)  # type: ignore[arg-type]
    group = getattr(engine, "model_update_group", None)
    if group is None or group.disabled:
        # A disabled communicator skips every broadcast without a word, and the engine loads uninitialised memory.
        raise TransferError("NCCL is disabled in the trainer (no libnccl, or VLLM_DISABLE_PYNCCL is set)")
    return engine


class NcclTransfer:
    """Transfer between GPUs."""

    concurrent = False

    def __init__(self, connect: Connect = connect_nccl) -> None:
        self._connect = connect
        self._links = Links("check its log and the NCCL settings of both sides")

    def prepare(self, weights: Weights, stamp: Stamp) -> int:
        return weights.bytes

    def is_open(self, engine: str) -> bool:
        return engine in self._links

    def open(self, engine: EngineControl, deadline_seconds: float) -> None:
        host, world_size = trainer_address(engine), 1 + engine.world_size(deadline_seconds)
        self._links.open(
            engine,
            PhaseClient(engine, deadline_seconds),
            lambda client, source: self._connect(host, free_port(host), world_size, client, source),
            deadline_seconds,
        )

    def send(self, engine: EngineControl, weights: Weights, deadline_seconds: float) -> None:
        """Broadcast the weights while the engine receives them."""
        self._links.send(engine, weights, deadline_seconds)

    def close(self, engine: str) -> None:
        self._links.close(engine)
