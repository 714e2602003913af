"""Recipes: YAML and overrides become a config, and a continued run may change how long and where, not what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_core.config import RunConfig
from grpo_core.recipe import ConfigError, changed_keys, continuable, digest, leaves, load, parse, with_changes

ROOT = Path(__file__).parents[2]


def recipe(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_overrides_reach_below_sections_that_the_file_does_not_have(tmp_path: Path) -> None:
    path = recipe(tmp_path, "grpo:\n  num_prompts_per_step: 4\n")
    config = load(path, ("grpo.async_grpo.max_trajectory_age_steps=0", "run_id=mine", "grpo.num_prompts_per_step=6"))
    assert config.grpo.async_grpo.max_trajectory_age_steps == 0
    assert (config.run_id, config.grpo.num_prompts_per_step) == ("mine", 6)


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("optimizer.learning_rate=3e-4", lambda c: c.optimizer.learning_rate == 3e-4),
        ("data.shuffle=false", lambda c: c.data.shuffle is False),
        ("data.system_prompt=a = b: c", None),
        ("data.system_prompt='a = b: c'", lambda c: c.data.system_prompt == "a = b: c"),
        ("generation.lease_prompts=null", lambda c: c.generation.lease_prompts is None),
        ("storage.options={a: 1}", lambda c: c.storage.options == {"a": 1}),
        ("pool={kind: external, urls: ['http://a:1']}", lambda c: c.pool.kind == "external"),
    ],
)
def test_override_values_are_yaml(tmp_path: Path, override: str, read: Any) -> None:
    path = recipe(tmp_path, "")
    if read is None:
        with pytest.raises(ConfigError, match="data.system_prompt"):
            load(path, (override,))
    else:
        assert read(load(path, (override,)))


@pytest.mark.parametrize("override", ["no equals", "=3", "a..b=3", ".a=3", "run_id.below=3"])
def test_malformed_overrides_are_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        load(recipe(tmp_path, "run_id: x"), (override,))


def test_unreadable_recipes_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="holds a list"):
        load(recipe(tmp_path, "- a\n- b\n"))
    with pytest.raises(ConfigError, match="not YAML"):
        load(recipe(tmp_path, "a: [1\n"))
    with pytest.raises(ConfigError, match="not YAML"):
        load(recipe(tmp_path, "a: !!python/object/apply:os.system ['true']\n"))
    (tmp_path / "bytes.yaml").write_bytes(b"a: \xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        load(tmp_path / "bytes.yaml")


def test_an_empty_recipe_is_the_defaults(tmp_path: Path) -> None:
    assert load(recipe(tmp_path, "")) == RunConfig()


CHANGES: list[dict[str, Any]] = [
    {"grpo": {"max_num_steps": 7}},
    {"grpo": {"max_num_epochs": 3}},
    {"pool": {"kind": "local", "engines": 2, "gpus": [[0], [1]], "extra_arguments": ["--yes", "\U0001f600 'q' \"d\""]}},
    {"pool": {"kind": "external", "urls": ["http://a:1", "https://b:2"]}},
    {"logging": {"progress_seconds": 1e-6}},
    {"evaluation": {"at_end": False}, "checkpointing": {"save_period": 3, "metric_name": "evaluation/sampled"}},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
@pytest.mark.parametrize("backwards", [False, True])
def test_a_claims_changes_give_the_config_back(change: dict[str, Any], backwards: bool) -> None:
    before, after = RunConfig(), parse(change, where="x")
    if backwards:
        before, after = after, before
    keys = changed_keys(before, after)
    assert keys and all(continuable(key) for key in keys)
    assert with_changes(before, {key: leaves(after).get(key) for key in keys}) == after


def test_digest_ignores_what_a_continued_run_may_change() -> None:
    for change in CHANGES:
        assert digest(parse(change, where="x")) == digest(RunConfig())
    for change in ({"seed": 1}, {"optimizer": {"learning_rate": 2e-6}}, {"grpo": {"num_prompts_per_step": 31}}):
        assert digest(parse(change, where="x")) != digest(RunConfig())


def test_a_key_is_continuable_by_whole_words() -> None:
    assert continuable("pool.engines") and continuable("grpo.max_num_steps")
    assert not continuable("grpo.max_num_steps_twice") and not continuable("pools") and not continuable("grpo")


@pytest.mark.parametrize("path", sorted((ROOT / "deployments/recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_every_recipe_that_comes_with_the_project_is_valid(path: Path) -> None:
    load(path)
