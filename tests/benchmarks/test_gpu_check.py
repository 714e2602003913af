"""The check of a GPU runs, small, on a CPU, and its cases agree with each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import gpu_check


def test_every_case_is_measured_and_agrees(tmp_path: Path) -> None:
    found = gpu_check.main(["--tiny", "-o", str(tmp_path / "check.json")])
    assert json.loads((tmp_path / "check.json").read_text()) == found
    assert not dist.is_initialized()
    apart, shared = found["steps"]
    assert (apart["share_prefixes"], shared["share_prefixes"]) == (False, True)
    assert shared["loss"] == pytest.approx(apart["loss"], abs=1e-5)
    assert apart["tokens_forwarded"] == apart["tokens"] == shared["tokens"] > shared["tokens_forwarded"]
    assert all(step["tokens_per_second"] > 0 for step in found["steps"])
    (logprobs,) = found["logprobs"]
    assert logprobs["value_difference"] <= 1e-5
    assert max(logprobs["hidden_gradient_difference"], logprobs["weight_gradient_difference"]) <= 1e-4
    assert logprobs["fused"]["seconds"] > 0 and logprobs["plain"]["seconds"] > 0


def test_a_case_that_does_not_fit_says_so_and_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room\nand a long story")

    monkeypatch.setattr(gpu_check, "run_step", full)
    monkeypatch.setattr(gpu_check, "token_logprobs", full)
    found = gpu_check.main(["--tiny", "-o", str(tmp_path / "check.json")])
    assert [step["failed"] for step in found["steps"]] == ["no room", "no room"]
    (logprobs,) = found["logprobs"]
    assert logprobs["fused"] == {"failed": "no room"} and "value_difference" not in logprobs


@pytest.mark.parametrize("size", [gpu_check.FULL, gpu_check.TINY])
def test_groups_fill_their_row(size: gpu_check.Size) -> None:
    for tokens in size.rows:
        groups = gpu_check.make_groups(tokens, 1000)
        total = sum(len(row.ids) for group in groups for row in group.rows)
        assert 0.9 * tokens <= total <= tokens or total == tokens // 2
