"""Packages import in one direction, contracts import without the heavy libraries, and no option is for show."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_core import config

ROOT = Path(__file__).parents[1]
MODULES = sorted(path for package in ("flows", "grpo_core", "storage") for path in (ROOT / package).rglob("*.py"))
FORBIDDEN = {"storage": {"grpo_core", "flows", "prefect"}, "grpo_core": {"flows", "prefect"}, "flows": set[str]()}
SECTIONS = [
    section
    for section in vars(config).values()
    if isinstance(section, type) and issubclass(section, config.Section) and section is not config.Section
]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_packages_import_only_downwards(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported(tree(path))}
    assert not roots & FORBIDDEN[path.relative_to(ROOT).parts[0]]
    assert "tests" not in roots and "benchmarks" not in roots


def test_contracts_import_without_the_heavy_libraries() -> None:
    contracts = ["config", "recipe", "prompts", "schedule.window", "schedule.frontier", "rollout.reconcile"]
    script = (
        "import sys, importlib\nsys.modules |= dict.fromkeys(['torch', 'vllm', 'prefect', 'transformers'])\n"
        + "\n".join(f"importlib.import_module('grpo_core.{name}')" for name in contracts)
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_storage_imports_without_torch() -> None:
    names = [name_of(path).removesuffix(".py").replace("/", ".") for path in MODULES if path.parts[-2] == "storage"]
    blocked = ["torch", "vllm", "prefect", "transformers", "grpo_core", "flows"]
    script = (
        f"import sys, importlib\nsys.modules |= dict.fromkeys({blocked})\n[importlib.import_module(n) for n in {names}]"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_are_short_and_documented(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400
    assert ast.get_docstring(tree(path))


def test_prefect_sees_real_annotations() -> None:
    """Prefect and typer read parameter types at run time."""
    postponed = [
        name_of(path)
        for path in MODULES
        if "flows" in path.parts
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ImportFrom) and node.module == "__future__"
    ]
    assert postponed == []


def read_names() -> set[str]:
    """Attributes that any code reads, and parameters that a whole section is passed on to by name."""
    names: set[str] = set()
    for path in MODULES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
    passed_on = next(
        node
        for node in ast.walk(tree(ROOT / "grpo_core/training/tiny_policy.py"))
        if isinstance(node, ast.FunctionDef) and node.name == "make"
    )
    return names | {argument.arg for argument in passed_on.args.kwonlyargs}


def test_every_key_is_read_by_some_code() -> None:
    known = read_names()
    assert [
        f"{section.__name__}.{key}" for section in SECTIONS for key in section.model_fields if key not in known
    ] == []


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_section_and_key_is_documented(section: type[config.Section]) -> None:
    assert section.__doc__ and section.__doc__ != config.Section.__doc__
    undocumented = [
        key
        for key, field in section.model_fields.items()
        if not field.description and key != "kind" and not is_section(field.annotation)
    ]
    assert undocumented == []


def is_section(annotation: object) -> bool:
    """A key that holds a section is documented by that section."""
    return isinstance(annotation, type) and issubclass(annotation, config.Section)
