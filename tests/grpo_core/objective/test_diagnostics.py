"""The mismatch figures have their documented values and vanish where engine and trainer agree."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from grpo_core.objective.diagnostics import LOG_RATIO_LIMIT, mismatch

CASE = json.loads((Path(__file__).parents[2] / "cases" / "losses.json").read_text())
FIGURES = {name: value for name, value in CASE["diagnostics"].items() if name != "definitions"}


@pytest.mark.parametrize("name", FIGURES)
def test_documented_figure(name: str) -> None:
    current, old, behaviour = (torch.tensor(CASE[key], dtype=torch.float64) for key in ("cur", "old", "gen"))
    numerator, denominator = mismatch(current, old, behaviour)[name]
    assert float(numerator / denominator) == pytest.approx(FIGURES[name], abs=1e-5)


def test_agreement_gives_no_error() -> None:
    logprobs = torch.tensor([-0.5, -3.0])
    figures = mismatch(logprobs, logprobs, logprobs)
    means = {name: float(top / bottom) for name, (top, bottom) in figures.items()}
    assert means["token_mult_prob_error"] == means["sampling_importance_ratio"] == 1
    assert means["gen_kl_error"] == means["policy_kl_error"] == 0
    assert means["js_divergence_error"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("gap", [-300.0, -18.0, -12.0, 12.0, 18.0, 300.0])
def test_policies_that_are_far_apart_give_finite_figures(gap: float) -> None:
    behaviour = torch.tensor([-400.0])
    figures = mismatch(behaviour, behaviour + gap, behaviour)
    x = max(-LOG_RATIO_LIMIT, min(gap, LOG_RATIO_LIMIT))
    expected = {
        "token_mult_prob_error": math.exp(abs(x)),
        "gen_kl_error": math.expm1(x) - x,
        "policy_kl_error": math.expm1(-x) + x,
        "js_divergence_error": math.log(math.cosh(x / 2)),
        "sampling_importance_ratio": math.exp(x),
    }
    for name, value in expected.items():
        assert float(figures[name][0]) == pytest.approx(value, rel=1e-5), name
