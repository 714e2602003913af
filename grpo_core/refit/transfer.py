"""What moves weights from the trainer to one engine, whatever the wire.

Links are per engine, not one group over the whole pool: a broadcast that loses one member leaves every other
member with half an update, which vLLM cannot undo, whereas a link that breaks costs only its own engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from grpo_core.refit.control import EngineControl
from grpo_core.refit.digest import TensorEntry, build_manifest


class TransferError(RuntimeError):
    """The weights did not reach an engine."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A complete set of policy weights in Hugging Face checkpoint names; `manifest[i]` describes `tensors[i]`."""

    tensors: tuple[tuple[str, torch.Tensor], ...]
    manifest: tuple[TensorEntry, ...]

    @classmethod
    def of(cls, named_tensors: Iterable[tuple[str, torch.Tensor]], *, digests: bool) -> Weights:
        """Raise ManifestError for an update that must not reach an engine."""
        tensors = tuple(named_tensors)
        return cls(tensors, build_manifest(tensors, digests=digests))


class Transfer(Protocol):
    """One way to move weights. Methods raise TransferError or ControlError and return within their deadline."""

    concurrent: bool
    """Whether `send` to several engines may run in parallel threads."""

    def is_open(self, engine: str) -> bool:
        """Whether a link to the engine of this name exists."""

    def open(self, engine: EngineControl, deadline_seconds: float) -> None:
        """Build the link; kept across refits until `close`."""

    def send(self, engine: EngineControl, weights: Weights, deadline_seconds: float) -> None:
        """Move all tensors into an engine that is paused and has started an update."""

    def close(self, engine: str) -> None:
        """Forget the link. Never waits for the engine."""
