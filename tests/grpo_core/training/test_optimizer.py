"""Only matrices decay, and the learning rate follows its schedule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from grpo_core.config import OptimizerConfig
from grpo_core.training.optimizer import learning_rate, make_optimizer


def test_only_matrices_decay() -> None:
    policy = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    optimizer = make_optimizer(policy, OptimizerConfig(learning_rate=0.1, weight_decay=0.5, beta1=0.8, eps=1e-6))
    matrices, vectors = optimizer.param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.5, 0.0)
    assert matrices["betas"] == (0.8, 0.999) and matrices["eps"] == 1e-6
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter, old in zip(policy.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), old * (0.95 if old.ndim >= 2 else 1.0))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447]),
    ],
)
def test_learning_rate_warms_up_and_then_follows_the_schedule(schedule: str, expected: list[float]) -> None:
    config = OptimizerConfig(learning_rate=1.0, schedule=schedule, warmup_steps=2)  # type: ignore[arg-type]
    assert [learning_rate(step, 6, config) for step in range(6)] == pytest.approx(expected, abs=1e-6)


def test_a_run_that_is_all_warm_up_divides_by_nothing() -> None:
    config = OptimizerConfig(learning_rate=1.0, schedule="cosine", warmup_steps=3)
    assert learning_rate(2, 3, config) == 1.0
    assert learning_rate(3, 3, config) == 1.0
