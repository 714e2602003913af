"""Every metric has one name, nothing is reported under another, and those of TRL and NeMo RL are all answered."""

from __future__ import annotations

import ast
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from grpo_core import metrics
from grpo_core.metrics import (
    ABSENT_FROM_NEMO_RL,
    ABSENT_FROM_TRL,
    DERIVED_FOR_NEMO_RL,
    DERIVED_FOR_TRL,
    METRICS,
    UnknownMetric,
    metric,
    reported,
)

ROOT = Path(__file__).parents[2]
THEIRS = json.loads((ROOT / "tests/cases/metric_names.json").read_text(encoding="utf-8"))
# Functions whose literal keys are names of metrics.
REPORTING: dict[str, tuple[str, ...]] = {
    "grpo_core/training/measures.py": ("*_measures",),
    "grpo_core/training/rollout_measures.py": ("*_measures",),
    "grpo_core/training/accounts.py": ("*_measures",),
    "grpo_core/training/saving.py": ("start", "wait"),
    "grpo_core/objective/credit.py": ("*_metrics",),
    "grpo_core/objective/losses.py": ("_loss", "*_metrics"),
    "grpo_core/objective/importance.py": ("believed", "*_metrics"),
    "grpo_core/objective/diagnostics.py": ("mismatch",),
    "grpo_core/rollout/load.py": ("pool_metrics",),
    "grpo_core/rollout/rewards.py": ("metrics",),
    "flows/engines.py": ("metrics",),
    "flows/progress.py": ("metrics",),
    "grpo_core/evaluation.py": ("metrics",),
}


@pytest.mark.parametrize("system", ["trl", "nemo_rl"])
def test_every_metric_of_theirs_is_answered_once(system: str) -> None:
    absent = ABSENT_FROM_TRL if system == "trl" else ABSENT_FROM_NEMO_RL
    derived = DERIVED_FOR_TRL if system == "trl" else DERIVED_FOR_NEMO_RL
    answered = [name for each in METRICS for name in getattr(each, system).split()]
    explained = [name for each in (*derived, *absent) for name in each.names.split()]
    assert Counter(answered + explained) == Counter(THEIRS[system])


@pytest.mark.parametrize("derived", [*DERIVED_FOR_TRL, *DERIVED_FOR_NEMO_RL], ids=lambda each: each.names)
def test_a_formula_is_made_of_metrics(derived: metrics.Derived) -> None:
    names = re.findall("`(.*?)`", derived.formula)
    assert names
    for name in names:
        metric(name)


def test_names_are_unique_and_described() -> None:
    assert len({each.name for each in METRICS}) == len(METRICS)
    assert all(each.unit and each.description for each in METRICS)
    assert all(each.name.count("*") == each.family for each in METRICS)


def test_no_name_is_of_a_family_and_of_a_metric_at_once() -> None:
    families = {each.name.partition("/")[0] for each in METRICS if each.family}
    assert [
        each.name
        for each in METRICS
        if not each.family and "/" in each.name and each.name.partition("/")[0] in families
    ] == []


def test_a_ratio_stays_a_pair_until_it_is_reported() -> None:
    parts = [(1.0, 1.0), (0.0, 9.0)]
    whole = (sum(top for top, _ in parts), sum(bottom for _, bottom in parts))
    assert reported({"reward_mean": whole, "loss": 2, "kl": (0.0, 0.0)}) == {"reward_mean": 0.1, "loss": 2.0}


@pytest.mark.parametrize("name", ["reward_maen", "reward", "reward/", "clip_ratio/middle", "tools/calculator", ""])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(UnknownMetric, match="grpo_core/metrics.py"):
        reported({name: 1.0})


@pytest.mark.parametrize("source", ["my_rewards:max_len_reward", "a/b:total_score", "m:min"])
def test_a_source_of_reward_may_be_called_anything(source: str) -> None:
    """TRL reads the reduction from the words of a name, and takes the first for a maximum and the second for a sum."""
    assert metric(f"reward/{source}").reduction == "ratio"


def test_infinite_and_missing_values_are_no_numbers() -> None:
    assert metrics.finite({"a": 1.0, "b": None, "c": math.nan, "d": math.inf}) == {"a": 1.0}


def test_the_page_is_current() -> None:
    assert (ROOT / "docs/metrics.md").read_text(encoding="utf-8") == metrics.page()


def keys_of(path: str, patterns: tuple[str, ...]) -> Iterator[str]:
    """The literal keys of dicts, and of assignments to items, in the functions of these names."""
    for function in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(function, ast.FunctionDef) and any(fnmatchcase(function.name, p) for p in patterns):
            for node in ast.walk(function):
                if isinstance(node, ast.Dict):
                    yield from (name for key in node.keys for name in spelled(key))
                elif isinstance(node, ast.DictComp):
                    yield from spelled(node.key)
                elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                    yield from spelled(node.slice)


def spelled(key: ast.expr | None) -> list[str]:
    """A literal, or one that begins with a literal and goes on with any word."""
    if isinstance(key, ast.Constant):
        return [str(key.value)]
    if isinstance(key, ast.JoinedStr) and isinstance(key.values[0], ast.Constant):
        return [f"{key.values[0].value}word"]
    return []


@pytest.mark.parametrize("path", REPORTING)
def test_everything_that_is_measured_is_registered(path: str) -> None:
    names = set(keys_of(path, REPORTING[path]))
    assert names
    for name in names:
        metric(name)
