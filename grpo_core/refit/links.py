"""Links to engines through vLLM's own trainer engines, which NCCL and CUDA IPC share: opened, used and closed by name.

vLLM's trainer engine drives start, update and finish by itself and without a version. Here the coordinator
owns these phases, so the engine gets a client that only carries `init` and `update`.

None of its calls can be interrupted, so each runs in a daemon thread and is given up at its deadline. A link over which
something failed is closed: what is still on its way belongs to an update that is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from grpo_core.background import call_in_background
from grpo_core.refit.control import ControlError, EngineControl
from grpo_core.refit.transfer import TransferError, Weights

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


@dataclass(frozen=True, slots=True)
class _Link:
    trainer: TrainerEngine
    client: PhaseClient
    source: HeldWeights


class Links:
    """The open links. `hint` says what to look at when one is not made, or does not carry, in time."""

    def __init__(self, hint: str) -> None:
        self._hint = hint
        self._links: dict[str, _Link] = {}

    def __contains__(self, engine: str) -> bool:
        return engine in self._links

    def open(
        self,
        engine: EngineControl,
        client: PhaseClient,
        connect: Callable[[PhaseClient, HeldWeights], TrainerEngine],
        deadline_seconds: float,
    ) -> None:
        """Raise TransferError or ControlError; then no link remains, not even one that is made after the deadline."""
        source = HeldWeights()
        made = on_device(lambda: connect(client, source))
        try:
            trainer = self._outcome(made, deadline_seconds, engine, "connect")
        except TransferError:
            made.add_done_callback(_shut_down)
            raise
        self._links[engine.name] = _Link(trainer, client, source)

    def send(self, engine: EngineControl, weights: Weights, deadline_seconds: float) -> None:
        """Let the engine receive the weights. Raise TransferError or ControlError; then the link is closed."""
        link = self._links[engine.name]
        link.client.engine, link.client.deadline_seconds, link.source.weights = engine, deadline_seconds, weights
        try:
            self._outcome(on_device(link.trainer.send_weights), deadline_seconds, engine, "receive the weights")
        except (TransferError, ControlError):
            self.close(engine.name)
            raise
        finally:
            link.source.weights = None

    def close(self, engine: str) -> None:
        """Shut the link down, which also ends a broadcast that waits for a lost engine."""
        link = self._links.pop(engine, None)
        if link is not None:
            link.trainer.shutdown()

    def _outcome(self, call: Future[T], deadline_seconds: float, engine: EngineControl, what: str) -> T:
        """TransferError at the deadline and for errors of the wire."""
        try:
            return call.result(timeout=deadline_seconds)
        except (ControlError, TransferError):
            raise
        except TimeoutError as error:
            raise TransferError(
                f"engine {engine.name} did not {what} within {deadline_seconds:g} s; {self._hint}"
            ) from error
        except RuntimeError as error:
            raise TransferError(f"engine {engine.name} did not {what}: {error}") from error


def on_device(call: Callable[[], T]) -> Future[T]:
    """Run `call` in a daemon thread on the caller's CUDA device: a new thread would otherwise use device 0."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> T:
        if device is not None:
            torch.cuda.set_device(device)
        return call()

    return call_in_background(run)


def _shut_down(made: Future[TrainerEngine]) -> None:
    if made.exception() is None:
        made.result().shutdown()
