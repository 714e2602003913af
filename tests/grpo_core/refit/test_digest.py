"""A manifest admits complete, finite, undamaged updates and nothing else."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from grpo_core.refit.digest import (
    ManifestError,
    TensorEntry,
    build_manifest,
    check_complete,
    check_digest,
    checkpoint_shapes,
    tensor_digest,
)

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WEIGHTS = [(EMBED, torch.arange(8.0).reshape(4, 2)), (HEAD, torch.ones(4, 2, dtype=torch.bfloat16))]
EXPECTED = {EMBED: (4, 2), HEAD: (4, 2)}


def test_digest_is_that_of_the_row_major_bytes() -> None:
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    assert tensor_digest(tensor) == hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
    assert tensor_digest(tensor.T) == tensor_digest(tensor.T.contiguous()) != tensor_digest(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_digest_sees_a_single_changed_element_in_any_dtype(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, 3, dtype=dtype)
    changed = tensor.clone()
    changed[2, 2] += 1
    assert tensor_digest(tensor) != tensor_digest(changed)
    assert tensor_digest(torch.tensor(1.0)) == tensor_digest(torch.ones(1))


def test_manifest_describes_each_tensor_in_order_and_survives_json() -> None:
    manifest = build_manifest(WEIGHTS, digests=True)
    assert [(e.name, e.dtype, e.shape) for e in manifest] == [(EMBED, "float32", (4, 2)), (HEAD, "bfloat16", (4, 2))]
    assert tuple(TensorEntry.from_json(entry.as_json()) for entry in manifest) == manifest
    assert [entry.digest for entry in build_manifest(WEIGHTS, digests=False)] == [None, None]


@pytest.mark.parametrize(
    ("weights", "named"),
    [
        ([*WEIGHTS, WEIGHTS[0]], EMBED),
        (WEIGHTS[:1], HEAD),
        ([WEIGHTS[0], (HEAD, torch.tensor([1.0, float("nan")]))], HEAD),
        ([(EMBED, torch.tensor([float("inf")])), WEIGHTS[1]], EMBED),
    ],
)
def test_update_that_must_not_reach_an_engine_is_refused_by_name(weights: Any, named: str) -> None:
    with pytest.raises(ManifestError, match=named):
        build_manifest(weights, digests=False)


def test_complete_update_is_accepted_with_the_head_absent_from_a_tied_checkpoint() -> None:
    manifest = build_manifest(WEIGHTS, digests=False)
    check_complete(manifest, EXPECTED)
    check_complete(manifest, {EMBED: (4, 2)})


@pytest.mark.parametrize(
    ("expected", "named"),
    [
        ({**EXPECTED, "model.norm.weight": (2,)}, "model.norm.weight"),
        ({HEAD: (4, 2)}, EMBED),
        ({**EXPECTED, EMBED: (2, 4)}, EMBED),
    ],
)
def test_update_that_does_not_fit_the_checkpoint_is_refused_by_name(expected: Any, named: str) -> None:
    with pytest.raises(ManifestError, match=named):
        check_complete(build_manifest(WEIGHTS, digests=False), expected)


def test_repeated_name_and_missing_head_are_refused_on_receipt_too() -> None:
    entries = build_manifest(WEIGHTS, digests=False)
    with pytest.raises(ManifestError, match="twice"):
        check_complete([*entries, entries[0]], EXPECTED)
    with pytest.raises(ManifestError, match=HEAD):
        check_complete(entries[:1], {EMBED: (4, 2)})


def test_damaged_tensor_is_refused_and_one_without_digest_is_not_checked() -> None:
    entry = build_manifest(WEIGHTS, digests=True)[0]
    check_digest(entry, WEIGHTS[0][1])
    damaged = WEIGHTS[0][1] + 1
    with pytest.raises(ManifestError, match="damaged"):
        check_digest(entry, damaged)
    check_digest(TensorEntry(entry.name, entry.dtype, entry.shape), damaged)


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(ManifestError, match="nonsense"):
        TensorEntry.from_json({"name": "x", "dtype": "nonsense", "shape": [1]})


def test_shapes_come_from_all_files_of_a_checkpoint(tmp_path: Path) -> None:
    save_file({EMBED: torch.ones(4, 2)}, tmp_path / "model-1.safetensors")
    save_file({HEAD: torch.ones(4, 2)}, tmp_path / "model-2.safetensors")
    assert checkpoint_shapes(tmp_path) == EXPECTED
    with pytest.raises(ManifestError, match="no safetensors"):
        checkpoint_shapes(tmp_path / "absent")
