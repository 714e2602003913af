"""What a weight update consists of: names, dtypes, shapes and, on request, digests of the bytes.

A manifest is made by the trainer before any engine is touched and checked by the engine before the first
tensor is loaded. It is complete and free of duplicates: an update that misses one part of a fused layer, or
sends a tensor twice, makes vLLM compute with uninitialised memory while every call answers 200.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

# The output head is part of every update, tied or not: on CPU vLLM keeps a packed copy of a tied head which
# an update of the embedding alone leaves stale.
HEAD = "lm_head.weight"


class ManifestError(ValueError):
    """An update that must not reach an engine."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of an update. `dtype` is torch's name without the module; `digest` is a sha256 in hex or None."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorEntry:
        """Raise ManifestError for a dtype that torch does not have."""
        name, dtype, shape = str(data["name"]), str(data["dtype"]), tuple(int(size) for size in data["shape"])
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ManifestError(f"tensor {name} has unknown dtype {dtype!r}; send a torch dtype such as float32")
        return cls(name, dtype, shape, data.get("digest"))


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as a flat uint8 tensor on the CPU; no copy when it is contiguous there already."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def tensor_digest(tensor: torch.Tensor) -> str:
    """sha256 of the tensor's bytes in row-major order, in hex."""
    return hashlib.sha256(raw_bytes(tensor).numpy().data).hexdigest()


def build_manifest(named_tensors: Iterable[tuple[str, torch.Tensor]], *, digests: bool) -> tuple[TensorEntry, ...]:
    """Describe an update, refusing duplicates, a missing output head and values that are not finite."""
    entries: dict[str, TensorEntry] = {}
    for name, tensor in named_tensors:
        if name in entries:
            raise ManifestError(f"tensor {name} occurs twice in the weight update; send every tensor once")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ManifestError(f"tensor {name} holds NaN or infinity; the policy has diverged and is not refitted")
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest = tensor_digest(tensor) if digests else None
        entries[name] = TensorEntry(name, dtype, tuple(tensor.shape), digest)
    if HEAD not in entries:
        raise ManifestError(f"{HEAD} is missing from the weight update; send it even when it is tied to the embedding")
    return tuple(entries.values())


def check_complete(manifest: Iterable[TensorEntry], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ManifestError unless the manifest names exactly the `expected` tensors, with their shapes.

    `expected` is what the engine itself was started from; the head may be absent there when it is tied.
    """
    entries = list(manifest)
    sent = {entry.name: entry.shape for entry in entries}
    if len(sent) != len(entries):
        raise ManifestError("the weight update names a tensor twice; send every tensor once")
    missing = sorted((set(expected) | {HEAD}) - set(sent))
    unknown = sorted(set(sent) - set(expected) - {HEAD})
    if missing or unknown:
        raise ManifestError(
            f"the weight update does not match the engine's checkpoint (missing {missing[:3]}, unknown {unknown[:3]}); "
            "start the engine from the model that is trained"
        )
    for name, shape in expected.items():
        if sent[name] != tuple(shape):
            raise ManifestError(
                f"tensor {name} has shape {sent[name]} but the engine's checkpoint has {tuple(shape)}; "
                "start the engine from the model that is trained"
            )


def check_digest(entry: TensorEntry, tensor: torch.Tensor) -> None:
    """Raise ManifestError when the bytes received are not those the trainer sent."""
    if entry.digest is not None and tensor_digest(tensor) != entry.digest:
        raise ManifestError(f"tensor {entry.name} was damaged on its way to the engine; nothing was loaded")


def checkpoint_shapes(directory: str | Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a safetensors checkpoint, read from the file headers only."""
    from safetensors import safe_open

    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise ManifestError(f"no safetensors file in {directory}; an engine must be started from a real checkpoint")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes
