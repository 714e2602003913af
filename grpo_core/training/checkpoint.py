"""The trainer's tensors at rest: written with torch.distributed.checkpoint as safetensors, read back onto any mesh.

Contract: model and optimizer moments are tensors in safetensors files (no pickle anywhere); small facts, random states
among them, are JSON in the manifest, which `storage.checkpoints` commits last. The place in the learning-rate schedule
is no state: it follows from the step. Every rank calls `write`, `load` and `resume`.

A resume with another number of ranks has the same tensors, resharded, but no random state to continue: each rank then
begins one that seed, step and rank decide, so that the resume can be repeated.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from grpo_core.seeds import derived_seed
from storage import layout
from storage.checkpoints import Manifest
from storage.objects import ObjectStore

# A file is built in memory before it is written, so its size bounds what a save needs beside the copy.
FILE_BYTES = 256 * 2**20
ALIGNMENT_BYTES = 64
PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every CUDA context of the process


def write(directory: Path, tensors: Mapping[str, Tensor], *, group: dist.ProcessGroup | None = None) -> None:
    """Write this rank's share into `directory`, which all ranks of the machine see; `group` (None: that of the process)
    carries the planning. Raise CheckpointException on every rank when one of them fails."""
    writer = HuggingFaceStorageWriter(str(directory), fqn_to_index_mapping=_files(tensors), save_distributed=True)
    dcp.save(dict(tensors), storage_writer=writer, process_group=group)


def load(directory: Path, policy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore, in place, what `write` wrote of `tensors_of`, whatever the number of ranks was."""
    dcp.load(tensors_of(policy, optimizer), storage_reader=HuggingFaceStorageReader(str(directory)))


def resume(
    store: ObjectStore, manifest: Manifest, policy: nn.Module, optimizer: torch.optim.Optimizer, *, seed: int
) -> None:
    """Make policy, optimizer and random state of this rank those of the checkpoint, by the rule of this module."""
    prefix = layout.checkpoint(manifest.attempt, manifest.step)
    local = store.local_path(prefix)
    if local is not None:
        load(local, policy, optimizer)
    else:
        with tempfile.TemporaryDirectory(prefix="forebay-resume-") as name:
            store.download(prefix, Path(name))
            load(Path(name), policy, optimizer)
    states, rank, ranks = manifest.extra["random_states"], dist.get_rank(), dist.get_world_size()
    if len(states) == ranks:
        restore_random_states(states[rank])
    else:
        torch.manual_seed(derived_seed(seed, manifest.step, rank, ranks))


def tensors_of(policy: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Views of everything that is saved, by name; loading writes through them.

    Parameters that are not trained are those of version 0 and are left out. One that no step has touched yet has the
    moments that AdamW begins with.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in policy.named_parameters():
        if not parameter.requires_grad:
            continue
        tensors[f"model.{name}"] = parameter.detach()
        if not optimizer.state[parameter]:
            moments = {moment: torch.zeros_like(parameter) for moment in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}
        for moment, value in optimizer.state[parameter].items():
            # A safetensors slice needs an axis, which the step count has not.
            tensors[f"optimizer.{name}.{moment}"] = value if value.ndim else value.view(1)
    return tensors


class HostCopy:
    """A copy of this rank's tensors in host memory: allocated once, and filled again for every save.

    Sharded tensors stay sharded, over `mesh`, a mesh of all ranks on the CPU. The memory is page-locked where the
    tensors are on a GPU, as a copy is several times faster then.
    """

    def __init__(self, tensors: Mapping[str, Tensor], mesh: DeviceMesh) -> None:
        locals_ = {name: _local(tensor) for name, tensor in tensors.items()}
        ends = np.cumsum([_aligned(tensor.nbytes) for tensor in locals_.values()])
        memory = torch.empty(int(ends[-1]), dtype=torch.uint8)
        self._on_gpu = any(tensor.is_cuda for tensor in locals_.values())
        if self._on_gpu:
            _page_lock(memory)
        self._targets: dict[str, Tensor] = {}
        self.tensors: dict[str, Tensor] = {}
        for (name, local), end in zip(locals_.items(), ends.tolist(), strict=True):
            begin = end - _aligned(local.nbytes)
            # Through NumPy, so that a tensor's storage is its own bytes:
            # of a view, the writer would make one more copy.
            own = torch.from_numpy(memory.numpy()[begin : begin + local.nbytes])
            self._targets[name] = own.view(local.dtype).view(local.shape)
            self.tensors[name] = _as_sharded(self._targets[name], tensors[name], mesh)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors`, named and shaped as those of the beginning; when this returns they may change."""
        for name, tensor in tensors.items():
            self._targets[name].copy_(_local(tensor), non_blocking=True)
        if self._on_gpu:
            torch.cuda.synchronize()


def _page_lock(memory: Tensor) -> None:
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE))  # type: ignore[attr-defined]
    if code:
        raise RuntimeError(
            f"{memory.nbytes} bytes of host memory for checkpoints cannot be page-locked (cudaError {code}); "
            "raise the limit on locked memory, or give the machine more memory"
        )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as_sharded(local: Tensor, like: Tensor, mesh: DeviceMesh) -> Tensor:
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(local, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Which of a rank's files, counted from 1, holds which tensor: of FILE_BYTES at most, or of one larger tensor."""
    files, file, size = {}, 1, 0
    for name, tensor in tensors.items():
        added = _local(tensor).nbytes
        if size and size + added > FILE_BYTES:
            file, size = file + 1, 0
        files[name] = file
        size += added
    return files


def random_states() -> dict[str, Any]:
    """The random states of this process, as JSON."""
    states: dict[str, Any] = {"torch": torch.get_rng_state().numpy().tobytes().hex()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return states


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Inverse of `random_states`."""

    def tensor(text: str) -> Tensor:
        return torch.from_numpy(np.frombuffer(bytes.fromhex(text), dtype=np.uint8).copy())

    torch.set_rng_state(tensor(states["torch"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensor(states["cuda"]))
