"""A version of the policy in files: whole, or as the difference to an earlier one, always with its manifest.

    manifest.json        every tensor with dtype, shape and the digest of its bytes
    weights.safetensors  of a full version: the tensors
    delta.safetensors    of a difference: `delta.encode` of each tensor that changed

Contract: what `restore` returns is, byte for byte, what was written, or it raises; so an engine that loads it holds the
trainer's weights. Nothing here is a pickle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_tensors

from grpo_core.refit.delta import Bytes, decode, encode
from grpo_core.refit.digest import ManifestError, TensorEntry, raw_bytes

MANIFEST, FULL, DELTA = "manifest.json", "weights.safetensors", "delta.safetensors"

Tensors = Mapping[str, torch.Tensor]


def write_full(directory: Path, tensors: Tensors, manifest: tuple[TensorEntry, ...]) -> None:
    """Write a full version. Tensors that share memory are written one by one."""
    save_tensors({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, directory / FULL)
    _write_manifest(directory, manifest)


def write_delta(
    directory: Path, tensors: Tensors, base: Mapping[str, Bytes], manifest: tuple[TensorEntry, ...]
) -> None:
    """Write the difference of `tensors` to `base`, flat bytes of the same names and sizes."""
    differences = {
        name: encode(raw_bytes(tensor).numpy(), base[name], tensor.element_size()) for name, tensor in tensors.items()
    }
    save_file(
        {name: difference for name, difference in differences.items() if difference is not None}, directory / DELTA
    )
    _write_manifest(directory, manifest)


def read_manifest(directory: Path) -> tuple[TensorEntry, ...]:
    """Raise ManifestError for one that cannot be used."""
    try:
        entries = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        return tuple(TensorEntry.from_json(entry) for entry in entries)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ManifestError(f"{directory / MANIFEST} is not the manifest of a policy: {error}") from error


def restore(directory: Path, base: Tensors) -> dict[str, torch.Tensor]:
    """The tensors of the version in `directory`, on top of `base` when it is a difference; digests are not compared."""
    if (directory / FULL).exists():
        return read_tensors(directory / FULL)
    differences = load_file(directory / DELTA)
    tensors: dict[str, torch.Tensor] = {}
    for entry in read_manifest(directory):
        before = base.get(entry.name)
        if before is None or tuple(before.shape) != entry.shape or before.dtype != getattr(torch, entry.dtype):
            raise ManifestError(
                f"tensor {entry.name} of a difference does not fit its base version; publish it in full"
            )
        difference = differences.get(entry.name)
        if difference is None:
            tensors[entry.name] = before
            continue
        try:
            after = decode(difference, raw_bytes(before).numpy(), before.element_size())
        except ValueError as error:
            raise ManifestError(f"tensor {entry.name} of a difference is damaged: {error}") from error
        tensors[entry.name] = torch.from_numpy(np.ascontiguousarray(after)).view(before.dtype).reshape(before.shape)
    return tensors


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file, mapped into memory rather than read."""
    with safe_open(file, framework="pt") as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118


def _write_manifest(directory: Path, manifest: tuple[TensorEntry, ...]) -> None:
    text = json.dumps([entry.as_json() for entry in manifest])
    (directory / MANIFEST).write_text(text, encoding="utf-8")
