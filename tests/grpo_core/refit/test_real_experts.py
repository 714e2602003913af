"""Mixtures of experts on real vLLM engines: what is refitted is what the trainer has, time and again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grpo_core.refit.control import EngineAddress
from grpo_core.refit.coordinator import refit_weights
from grpo_core.refit.gloo import GlooTransfer
from grpo_core.trajectory import Stamp
from tests.grpo_core.refit.real import SETTINGS, canary_of, randomise, weights_of
from tests.vllm_engine import running_engines, write_tiny_model

pytestmark = pytest.mark.vllm


def test_refits_of_experts_agree_with_the_trainer(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    directories = [
        write_tiny_model(tmp_path / "mixtral", "mixtral", tied=False, num_local_experts=4),
        write_tiny_model(
            tmp_path / "qwen3", "qwen3_moe", tied=False, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
        ),
    ]
    transfer = GlooTransfer()
    with running_engines(directories, tmp_path) as engines:
        for engine in engines:
            model = AutoModelForCausalLM.from_pretrained(engine.model, dtype=torch.float32)
            for version in range(2):
                randomise(model, seed=version)
                result = refit_weights(
                    weights_of(model),
                    [EngineAddress(str(engine.model), engine.url)],
                    Stamp(1, version),
                    transfer,
                    SETTINGS,
                    canary=canary_of(model),
                )
                assert result.broken == ()
                assert result.canary[str(engine.model)] <= 1e-4
