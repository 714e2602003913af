"""What the views show are metrics of the registry, under its names."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.artifacts import COLUMNS
from grpo_core.metrics import metric

ROOT = Path(__file__).parents[2]


def looked_up(path: str) -> Iterator[str]:
    """Names that are taken out of a mapping called `metrics`, and those of the report's curves."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called.endswith("metrics.get") and isinstance(node.args[0], ast.Constant):
            yield node.args[0].value
        elif called == "_curves":
            yield from (argument.elts[0].value for argument in node.args[1:] if isinstance(argument, ast.Tuple))


@pytest.mark.parametrize(
    "path",
    [
        "flows/views/series.py",
        "flows/views/report.py",
        "flows/views/charts.py",
        "flows/progress.py",
        "flows/leasing.py",
    ],
)
def test_views_look_up_metrics_that_a_step_has(path: str) -> None:
    names = set(looked_up(path))
    assert names
    assert {metric(name).scope for name in names} == {"step"}


def test_the_table_of_the_flow_shows_metrics_of_a_step() -> None:
    assert {metric(name).scope for name in COLUMNS if name != "step"} == {"step"}
