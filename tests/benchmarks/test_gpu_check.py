"""The check of a GPU runs, small, on a CPU; its cases agree with each other, and none of them ends the others."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import gpu_cases, gpu_check
from grpo_core.config import ObjectiveConfig, OptimizerConfig, RunConfig
from grpo_core.objective.settings import ObjectiveSettings

# What the project needs and a machine with torch and transformers may lack.
ABSENT = (
    *("pydantic", "prefect", "vllm", "peft", "pyarrow", "fsspec", "aiohttp", "requests", "psutil", "rich", "tenacity"),
    *("accelerate", "gguf", "jinja2", "matplotlib"),
)


def test_every_case_is_measured_and_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = gpu_check.main(["--tiny", "-o", str(tmp_path / "check.json")])
    assert json.loads((tmp_path / "check.json").read_text()) == found
    assert not dist.is_initialized()
    apart, shared = found["steps"]
    assert (apart["share_prefixes"], shared["share_prefixes"]) == (False, True)
    assert shared["loss"] == pytest.approx(apart["loss"], abs=1e-5)
    assert apart["tokens_forwarded"] == apart["tokens"] == shared["tokens"] > shared["tokens_forwarded"]
    assert all(step["tokens_per_second"] > 0 for step in found["steps"])
    (errors,) = found["errors"]
    assert errors["fused"]["value"] <= 1e-5
    assert max(errors["fused"]["hidden_gradient"], errors["fused"]["weight_gradient"]) <= 1e-4
    (logprobs,) = found["logprobs"]
    assert logprobs["fused"]["seconds"] > 0 and logprobs["plain"]["seconds"] > 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 + 2 + 2 and "tokens/s" in lines[-1]


def test_a_case_that_fails_says_why_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room\nand a long story")

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("NCCL is not there")

    monkeypatch.setattr(gpu_cases, "run_step", broken)
    monkeypatch.setitem(gpu_cases.WAYS, "fused", full)
    found = gpu_check.main(["--tiny", "-o", str(tmp_path / "check.json")])
    assert [step["failed"] for step in found["steps"]] == ["RuntimeError: NCCL is not there"] * 2
    assert found["errors"][0]["failed"] == "OutOfMemoryError: no room"
    assert found["logprobs"][0]["fused"] == {"failed": "no room"} and found["logprobs"][0]["plain"]["seconds"] > 0
    assert capsys.readouterr().out.count("NCCL is not there") == 2


def test_cases_that_no_time_is_left_for_are_given_up(tmp_path: Path) -> None:
    found = gpu_check.main(["--tiny", "--seconds", "0", "-o", str(tmp_path / "check.json")])
    cases = [case for part in ("logprobs", "errors", "steps") for case in found[part]]
    assert len(cases) == 4 and all("OutOfTime" in case["failed"] for case in cases)


def test_a_case_is_stopped_when_its_time_is_over() -> None:
    with pytest.raises(gpu_check.OutOfTime), gpu_check.alarm(0.01):
        time.sleep(60)


def test_torch_and_transformers_are_enough() -> None:
    hide = f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r})); import benchmarks.gpu_check"
    subprocess.run([sys.executable, "-c", hide], check=True, timeout=120, cwd=Path(__file__).parents[2])


def test_settings_are_those_of_the_run_config() -> None:
    names = {name for name in vars(ObjectiveSettings) if not name.startswith("_")}
    assert set(vars(gpu_cases.OBJECTIVE)) == names
    run = RunConfig()
    config: Any
    for plain, config in (
        (gpu_cases.OBJECTIVE, ObjectiveConfig()),
        (gpu_cases.OPTIMIZER, OptimizerConfig()),
        (gpu_cases.TRAINING, run.training),
    ):
        assert vars(plain) == {name: getattr(config, name) for name in vars(plain)}
    assert run.sampling.temperature == gpu_cases.TEMPERATURE


@pytest.mark.parametrize("size", [gpu_cases.FULL, gpu_cases.TINY])
def test_groups_fill_their_row(size: gpu_cases.Size) -> None:
    for tokens in size.rows:
        groups = gpu_cases.make_groups(tokens, 1000)
        total = sum(len(row.ids) for group in groups for row in group.rows)
        assert 0.9 * tokens <= total <= tokens or total == tokens // 2
