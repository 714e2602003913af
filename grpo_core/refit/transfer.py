"""What moves weights from the trainer to one engine, whatever the wire.

Links are per engine, not one group over the whole pool: a broadcast that loses one member leaves every other
member with half an update, which vLLM cannot undo, whereas a link that breaks costs only its own engine.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import torch

from grpo_core.refit.control import EngineControl
from grpo_core.refit.digest import TensorEntry, build_manifest
from grpo_core.trajectory import Stamp


class TransferError(RuntimeError):
    """The weights did not reach an engine."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A complete set of policy weights in Hugging Face checkpoint names; `manifest[i]` describes `tensors[i]`."""

    tensors: tuple[tuple[str, torch.Tensor], ...]
    manifest: tuple[TensorEntry, ...]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.tensors)

    @classmethod
    def of(cls, named_tensors: Iterable[tuple[str, torch.Tensor]], *, digests: bool) -> Weights:
        """Raise ManifestError for an update that must not reach an engine."""
        tensors = tuple(named_tensors)
        return cls(tensors, build_manifest(tensors, digests=digests))


class Transfer(Protocol):
    """One way to move weights. Methods raise TransferError or ControlError and return within their deadline."""

    concurrent: bool
    """Whether `send` to several engines may run in parallel threads."""

    def prepare(self, weights: Weights, stamp: Stamp) -> int:
        """What needs doing once for all engines, before any is touched; the bytes that each of them will receive."""

    def is_open(self, engine: str) -> bool:
        """Whether the engine of this name is ready to be sent what was prepared."""

    def open(self, engine: EngineControl, deadline_seconds: float) -> None:
        """Make it ready, while it still generates."""

    def send(self, engine: EngineControl, weights: Weights, deadline_seconds: float) -> None:
        """Move all tensors into an engine that is paused and has started an update."""

    def close(self, engine: str) -> None:
        """Forget the link. Never waits for the engine."""


def trainer_address(engine: EngineControl) -> str:
    """The address of this machine under which the engine can reach it: that of the interface that leads to the host of
    its URL, so loopback for an engine on loopback. Raises TransferError."""
    host = urlsplit(engine.url).hostname
    if host is None:
        raise TransferError(f"engine {engine.name} has no host in its URL {engine.url!r}; give it one")
    try:
        return local_address(host)
    except OSError as error:
        raise TransferError(f"no network interface leads to engine {engine.name} at {engine.url}: {error}") from error


def local_address(host: str) -> str:
    """The address of this machine from which `host` is reached. A UDP socket learns it without sending."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
