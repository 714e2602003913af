"""The trainer's side of the gloo transfer: one process group per engine, kept across refits.

A group holds the trainer (rank 0) and the workers of one engine, so the death of an engine can never
disturb the transfer to another. Every wait has a deadline: the store and the group have real timeouts, and
before each broadcast the workers say through the store that they accepted the manifest, so that a rejected
update is an error at once rather than a timeout.

Imports no vLLM.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]

from grpo_core.background import call_in_background
from grpo_core.refit.control import ControlError, EngineControl
from grpo_core.refit.digest import raw_bytes
from grpo_core.refit.transfer import TransferError, Weights, local_address, trainer_address
from grpo_core.trajectory import Stamp

# Keys of the group's store: a rank has reached the rendezvous; a rank has accepted an update's manifest.
JOINED = "joined"
READY = "ready"

POLL_SECONDS = 0.002
HEALTH_POLL_SECONDS = 1.0


@dataclass
class _Group:
    store: TCPStore
    processes: ProcessGroupGloo
    workers: int
    updates: int = 0


class GlooTransfer:
    """Transfer over TCP with gloo."""

    concurrent = True

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    def prepare(self, weights: Weights, stamp: Stamp) -> int:
        return weights.bytes

    def is_open(self, engine: str) -> bool:
        return engine in self._groups

    def open(self, engine: EngineControl, deadline_seconds: float) -> None:
        """Build the group of this process and the engine's workers. Raises TransferError or ControlError."""
        host = trainer_address(engine)
        try:
            self._groups[engine.name] = _join(engine, host, deadline_seconds)
        except (ControlError, TransferError):
            raise
        except RuntimeError as error:
            raise TransferError(f"engine {engine.name} and the trainer on {host} did not meet: {error}") from error

    def send(self, engine: EngineControl, weights: Weights, deadline_seconds: float) -> None:
        """Broadcast all tensors to the engine's workers. Raises TransferError or ControlError."""
        deadline = time.monotonic() + deadline_seconds
        group = self._groups[engine.name]
        group.updates += 1
        update = {
            "number": group.updates,
            "timeout_seconds": deadline_seconds,
            "manifest": [entry.as_json() for entry in weights.manifest],
        }
        answer = call_in_background(lambda: engine.update(update, deadline_seconds))
        _await_workers(group.store, f"{READY}/{group.updates}", group.workers, answer, deadline, engine)
        for name, tensor in weights.tensors:
            _broadcast(group.processes, name, tensor, deadline, engine)
        _await_answer(answer, deadline, engine)

    def close(self, engine: str) -> None:
        """Forget the engine's group; the engine need not answer any more."""
        self._groups.pop(engine, None)


def _join(engine: EngineControl, host: str, deadline_seconds: float) -> _Group:
    """Meet the engine's workers in a new group; `host` is where they find this process."""
    deadline = time.monotonic() + deadline_seconds
    workers = engine.world_size(deadline_seconds)
    timeout = timedelta(seconds=deadline_seconds)
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    info = {"host": host, "port": store.port, "world_size": workers + 1, "timeout_seconds": deadline_seconds}
    answer = call_in_background(lambda: engine.init_transfer(info, deadline_seconds))
    _await_workers(store, JOINED, workers, answer, deadline, engine)
    group = join_group(PrefixStore("group", store), 0, workers + 1, host, timeout)
    _await_answer(answer, deadline, engine)
    return _Group(store, group, workers)


def join_group(store: Store, rank: int, size: int, host: str, timeout: timedelta) -> ProcessGroupGloo:
    """Join a gloo group over the network interface that leads to `host`. Used by trainer and workers alike."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=local_address(host))]
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, size, options)


def _await_workers(
    store: TCPStore, key: str, workers: int, answer: Future[None], deadline: float, engine: EngineControl
) -> None:
    """Wait until every worker has set its key; the engine's early answer can only be an error."""
    keys = [f"{key}/{rank}" for rank in range(1, workers + 1)]
    while not store.check(keys):
        if answer.done():
            answer.result()
        if time.monotonic() > deadline:
            raise TransferError(f"engine {engine.name} did not report {key!r} in time; its worker hangs or is lost")
        time.sleep(POLL_SECONDS)


def _await_answer(answer: Future[None], deadline: float, engine: EngineControl) -> None:
    """Wait for the HTTP answer. A dead engine never answers a pending call, so its health is asked meanwhile."""
    while True:
        patience = min(HEALTH_POLL_SECONDS, deadline - time.monotonic())
        if patience <= 0:
            raise TransferError(f"engine {engine.name} did not answer the weight transfer in time; replace it")
        try:
            return answer.result(timeout=patience)
        except TimeoutError:
            if not answer.done() and not engine.is_healthy():
                raise TransferError(f"engine {engine.name} died during the weight transfer; replace it") from None


def _broadcast(
    group: ProcessGroupGloo, name: str, tensor: torch.Tensor, deadline: float, engine: EngineControl
) -> None:
    timeout = timedelta(seconds=max(deadline - time.monotonic(), POLL_SECONDS))
    try:
        group.broadcast(raw_bytes(tensor), root=0, timeout=timeout).wait(timeout)  # type: ignore[attr-defined]
    except RuntimeError as error:
        raise TransferError(f"tensor {name} did not reach engine {engine.name}: {error}") from error
