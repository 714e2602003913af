"""`forebay plan`: from a recipe alone, from speeds given by hand, and from a run that was."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from flows import cli
from flows.run import RunRefused
from flows.views.plan import measured_rates, render_plan
from grpo_core.config import RunConfig
from grpo_core.schedule.plan import plan
from grpo_core.schedule.rates import Given, rates_of
from storage import layout
from storage.objects import ObjectStore
from tests.flows.synthetic_run import SyntheticRun, small_run

RECIPE = """
run_id: planned
grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 4}
pool: {kind: local, max_num_seqs: 8}
"""


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore.open(str(tmp_path / "synthetic"))


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return str(path)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, ["plan", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_a_plan_for_programs_has_the_speeds_it_was_given(recipe: str) -> None:
    given = ["--tokens-per-second", "400", "--step-seconds", "3", "--mean-length", "120", "--sigma", "0"]
    status, text, _ = run(recipe, "--json", *given)
    found = json.loads(text)
    assert status == 0
    assert found["rates"] | {"assumed": []} == found["rates"]
    assert (found["rates"]["step_seconds"], found["rates"]["mean_length"]) == (3.0, 120.0)
    assert 0 < found["utilisation"]["trainer"] <= 1 and found["lag"]["max"] <= 2


def test_a_plan_for_people_fits_a_narrow_terminal(recipe: str) -> None:
    status, text, _ = run(recipe)
    assert status == 0 and "trainer busy" in text and "Assumed, not measured" in text
    config = RunConfig.model_validate({"grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 2}})
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render_plan(plan(config, rates_of(config, Given()))))
    shown = console.export_text()
    assert "…" not in shown and shown.count("advised") == 1


def test_the_speeds_of_a_run_are_read_from_its_store(store: ObjectStore) -> None:
    run = small_run(store)
    rates = measured_rates(store)
    assert (rates.step_seconds, rates.refit_seconds, rates.assumed) == (1.0, pytest.approx(0.5), ())
    # Rollouts of two to four tokens take a second and a half, all at the same time.
    assert 2 <= rates.lengths.mean <= 4
    assert 2 / 1.5 <= rates.sequence_tokens_per_second <= 4 / 1.5
    keys = store.list(layout.trajectories_prefix(run.attempt), recursive=True)
    rows = run.trajectories.read([name for key in keys if (name := layout.parse_part(key))])
    made = sum(sum(mask) for mask in rows.column("loss_mask").to_pylist())
    assert rates.engine_tokens_per_second == pytest.approx(made / 1.5)


def test_a_run_that_trained_nothing_cannot_be_planned_from(store: ObjectStore) -> None:
    SyntheticRun(store).claim()
    with pytest.raises(RunRefused, match="has trained no step yet"):
        measured_rates(store)


def test_planning_from_a_run_that_is_not_there_is_one_sentence(recipe: str, tmp_path: Path) -> None:
    status, _, error = run(recipe, "--from", "nobody", "--root", str(tmp_path))
    assert status == 1 and error.startswith("forebay: there is no run nobody")
