"""The trainer's tensors at rest: written with torch.distributed.checkpoint as safetensors, read back onto any mesh.

Contract: model, optimizer moments and random states are tensors in safetensors files (no pickle anywhere); small
facts are JSON in the manifest, which `storage.checkpoints` commits last. Every rank calls `save` and `load`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter


def save(directory: Path, policy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write this rank's share into `directory`, which all ranks of the machine see."""
    tensors = _tensors(policy, optimizer)
    dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(str(directory), save_distributed=True))


def load(directory: Path, policy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore, in place, what `save` wrote, whatever the number of ranks was."""
    dcp.load(_tensors(policy, optimizer), storage_reader=HuggingFaceStorageReader(str(directory)))


def _tensors(policy: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Views of everything that is saved, by name; loading writes through them.

    A parameter that no step has touched yet has the moments that AdamW begins with.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in policy.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        if not optimizer.state[parameter]:
            moments = {moment: torch.zeros_like(parameter) for moment in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
        for moment, value in optimizer.state[parameter].items():
            # A safetensors slice needs an axis, which the step count has not.
            tensors[f"optimizer.{name}.{moment}"] = value if value.ndim else value.view(1)
    return tensors


def random_states() -> dict[str, Any]:
    """The random states of this process, as JSON."""
    states: dict[str, Any] = {"torch": torch.get_rng_state().numpy().tobytes().hex()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Inverse of `random_states`."""

    def tensor(text: str) -> Tensor:
        return torch.from_numpy(np.frombuffer(bytes.fromhex(text), dtype=np.uint8).copy())

    torch.set_rng_state(tensor(states["torch"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensor(states["cuda"]))


def gather_json(value: Any) -> list[Any]:
    """One small plain value of every rank, on every rank, in rank order."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
