"""A difference and its base give the new bytes exactly, and what is damaged is not taken for weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_core.refit import snapshot
from grpo_core.refit.delta import decode, encode
from grpo_core.refit.digest import ManifestError, build_manifest, raw_bytes

SHAPES = {"model.embed_tokens.weight": (40, 16), "model.norm.weight": (16,), "lm_head.weight": (40, 16), "scale": ()}


def policy(seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("size", [0, 4, 4096])
def test_a_difference_gives_the_new_bytes(itemsize: int, size: int) -> None:
    draw = np.random.default_rng(size)
    base, new = (draw.integers(0, 256, size, dtype=np.uint8) for _ in range(2))
    difference = encode(new, base, itemsize)
    assert (difference is None) is (size == 0)
    if difference is not None:
        assert np.array_equal(decode(difference, base, itemsize), new)
    assert encode(base, base.copy(), itemsize) is None


def test_a_small_step_in_bfloat16_takes_a_small_part_of_the_bytes() -> None:
    base = torch.randn(200_000) * 0.02
    new = base + 1e-6 * torch.sign(torch.randn_like(base))
    bytes_of = [raw_bytes(tensor.to(torch.bfloat16)).numpy() for tensor in (new, base)]
    difference = encode(*bytes_of, 2)
    assert difference is not None and difference.size < 0.06 * bytes_of[0].size


def test_a_difference_of_another_size_is_refused() -> None:
    base, new = np.zeros(8, np.uint8), np.ones(8, np.uint8)
    difference = encode(new, base, 2)
    assert difference is not None
    with pytest.raises(ValueError, match="one size"):
        encode(new, base[:4], 2)
    for wrong in (np.zeros(16, np.uint8), np.zeros(4, np.uint8)):
        with pytest.raises(ValueError, match="difference"):
            decode(difference, wrong, 2)
    with pytest.raises(ValueError, match="not one of 8 bytes"):
        decode(np.arange(8, dtype=np.uint8), base, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_full_and_difference_restore_what_was_written(tmp_path: Path, dtype: torch.dtype) -> None:
    old, new = policy(1, dtype), policy(2, dtype)
    new["model.norm.weight"] = old["model.norm.weight"]
    full, delta = tmp_path / "full", tmp_path / "delta"
    full.mkdir()
    delta.mkdir()
    snapshot.write_full(full, old, build_manifest(old.items(), digests=True))
    held = {name: raw_bytes(tensor).numpy().copy() for name, tensor in old.items()}
    snapshot.write_delta(delta, new, held, build_manifest(new.items(), digests=True))
    restored = snapshot.restore(full, {})
    assert all(torch.equal(restored[name], old[name]) and restored[name].dtype == dtype for name in SHAPES)
    restored = snapshot.restore(delta, restored)
    assert all(torch.equal(restored[name], new[name]) for name in SHAPES)
    assert [entry.name for entry in snapshot.read_manifest(delta)] == list(SHAPES)


def test_a_difference_without_its_base_is_refused(tmp_path: Path) -> None:
    old = policy(1)
    held = {name: raw_bytes(tensor).numpy() for name, tensor in old.items()}
    snapshot.write_delta(tmp_path, policy(2), held, build_manifest(policy(2).items(), digests=True))
    with pytest.raises(ManifestError, match=r"embed_tokens.*does not fit its base"):
        snapshot.restore(tmp_path, {})
    with pytest.raises(ManifestError, match="does not fit its base"):
        snapshot.restore(tmp_path, policy(1, torch.float32))


@pytest.mark.parametrize("text", ["", "{}", "[1]", json.dumps([{"name": "a", "dtype": "no such", "shape": []}])])
def test_a_manifest_of_another_kind_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / snapshot.MANIFEST).write_text(text)
    if text == "{}":
        assert snapshot.read_manifest(tmp_path) == ()
        return
    with pytest.raises(ManifestError):
        snapshot.read_manifest(tmp_path)
