"""Transfer with vLLM's own NCCL engine: one communicator per engine, the trainer's rank 0 and its workers.

vLLM's trainer engine drives start, update and finish by itself and without a version. Here the coordinator
owns these phases, so the engine gets a client that only carries `init` and `update`.

NCCL calls cannot be interrupted, so a transfer runs in a daemon thread; at the deadline its communicator is
aborted. Sends to different engines run one after the other: kernels of several communicators on one device
may block each other. Both sides need one libnccl, one GPU per rank, and the same NCCL settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import torch

from grpo_core.ports import free_port
from grpo_core.refit.control import ControlError, EngineControl, call_in_background
from grpo_core.refit.transfer import TransferError, Weights, trainer_address
from grpo_core.trajectory import Stamp

T = TypeVar("T")


class TrainerEngine(Protocol):
    """The part of vLLM's `TrainerWeightTransferEngine` that is used."""

    def send_weights(self) -> None: ...
    def shutdown(self) -> None: ...


class PhaseClient:
    """vLLM's four-method client for one engine, without the phases that the coordinator owns.

    `encode` turns an update into what JSON can carry.
    """

    def __init__(
        self,
        engine: EngineControl,
        deadline_seconds: float,
        encode: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    ) -> None:
        self.engine = engine
        self.deadline_seconds = deadline_seconds
        self._encode = encode

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.engine.init_transfer(init_info, self.deadline_seconds)

    def start_weight_update(self) -> None:
        """The coordinator has sent it."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.engine.update(self._encode(update_info), self.deadline_seconds)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The coordinator sends it, with the stamp."""


class HeldWeights:
    """The weights of the current refit behind vLLM's `WeightSource` interface (iterated, never gathered, here)."""

    def __init__(self) -> None:
        self.weights: Weights | None = None

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._held().tensors]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._held().tensors)

    def _held(self) -> Weights:
        if self.weights is None:
            raise TransferError("the transfer holds no weights; set them before sending")
        return self.weights


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
        self._links: dict[str, tuple[TrainerEngine, PhaseClient, HeldWeights]] = {}

    def prepare(self, weights: Weights, stamp: Stamp) -> int:
        return weights.bytes

    def is_open(self, engine: str) -> bool:
        return engine in self._links

    def open(self, engine: EngineControl, deadline_seconds: float) -> None:
        host, world_size = trainer_address(engine), 1 + engine.world_size(deadline_seconds)
        client, source = PhaseClient(engine, deadline_seconds), HeldWeights()
        link = on_device(lambda: self._connect(host, free_port(host), world_size, client, source))
        self._links[engine.name] = (await_link(link, deadline_seconds, engine, "connect"), client, source)

    def send(self, engine: EngineControl, weights: Weights, deadline_seconds: float) -> None:
        """Broadcast the weights while the engine receives them. Raise TransferError."""
        link, client, source = self._links[engine.name]
        client.engine, client.deadline_seconds, source.weights = engine, deadline_seconds, weights
        try:
            await_link(on_device(link.send_weights), deadline_seconds, engine, "receive the weights")
        except TransferError:
            self.close(engine.name)
            raise
        finally:
            source.weights = None

    def close(self, engine: str) -> None:
        """Abort the communicator, which also ends a broadcast that waits for a lost engine."""
        link = self._links.pop(engine, None)
        if link is not None:
            link[0].shutdown()


def on_device(call: Callable[[], T]) -> Future[T]:
    """Run `call` in a daemon thread on the caller's CUDA device: a new thread would otherwise use device 0."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> T:
        if device is not None:
            torch.cuda.set_device(device)
        return call()

    return call_in_background(run)


def await_link(future: Future[T], deadline_seconds: float, engine: EngineControl, what: str) -> T:
    """The outcome of a transfer call; TransferError at the deadline and for errors of the wire."""
    try:
        return future.result(timeout=deadline_seconds)
    except (ControlError, TransferError):
        raise
    except TimeoutError as error:
        raise TransferError(
            f"engine {engine.name} did not {what} within {deadline_seconds:g} s; check its log and the NCCL settings "
            "of both sides"
        ) from error
    except RuntimeError as error:
        raise TransferError(f"engine {engine.name} did not {what}: {error}") from error
