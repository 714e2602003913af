"""Versions are evaluated while training goes on:
none is lost to a kill, each is kept as what it is, one ends the run."""

from __future__ import annotations

from typing import Any

from grpo_core.evaluation import living_evaluations, read_evaluations
from storage.attempts import living_chain
from storage.ledger import newest_footer
from storage.objects import ObjectStore
from tests.scenarios.conftest import MakeDriver
from tests.scenarios.run_driver import RunDriver, newest_manifest
from tests.scenarios.scenario_rewards import HOLD
from tests.scenarios.soundness import assert_sound, attempts

# Four completions of each of two prompts, and the best answer to each.
EVALUATION: dict[str, Any] = {
    "at_start": True,
    "at_end": True,
    "every_steps": 2,
    "samples": 8,
    "samples_per_prompt": 4,
    "pass_threshold": 0.5,
}


def evaluated(store: ObjectStore) -> list[int]:
    return [name.version for name in living_evaluations(store, living_chain(store), every_steps=1)]


def assert_nothing_lost(driver: RunDriver) -> None:
    """Each of the due versions 2, 4, … was served once, by the next one that was evaluated, which says so."""
    served: list[int] = []
    for found in read_evaluations(driver.store, driver.config):
        due = list(range(2 * len(served) + 2, found.version + 1, 2))
        assert found.due == (due[0] if due else None)
        served += due
    assert served == list(range(2, driver.config.grpo.max_num_steps + 1, 2))


def step_done(store: ObjectStore) -> int:
    footer = newest_footer(store, steps_only=True)
    return 0 if footer is None else footer.name.step


def test_every_due_version_is_evaluated_though_the_flow_is_killed_in_an_evaluation(
    make_driver: MakeDriver,
) -> None:
    held = {"rewards": {"functions": [{"function": "scenario_rewards:even_share_when_let"}]}}
    driver = make_driver(
        settings={"evaluation": {**EVALUATION, "at_start": False}, "grpo": {"max_num_steps": 8}, **held}
    )
    hold = driver.directory / HOLD
    hold.touch()
    driver.start()
    # Training goes on beside the evaluation of version 2, which does not end,
    # until that of version 4 can begin no more.
    driver.wait_for(lambda store: step_done(store) >= 5 and newest_manifest(store).step >= 4)
    assert evaluated(driver.store) == []
    driver.kill("flow")
    assert driver.orphans() == []
    hold.unlink()
    assert driver.run() == 0, driver.errors
    assert attempts(driver.store) == 2
    assert_sound(driver)
    assert_nothing_lost(driver)
    found = read_evaluations(driver.store, driver.config)
    assert found[0].due == 2 < found[0].version, "the weights of version 2 were gone"
    assert found[-1].version == 8 and found[-1].purity == 1.0, "nothing moves on beside the last one"
    assert all(e.scores.keys() == {"sampled", "greedy", "pass@1", "pass@2", "pass@4"} for e in found)
    assert all(e.purity is not None and 0 < e.purity <= 1 for e in found)
    assert driver.orphans() == []


def test_run_ends_when_an_evaluation_reaches_the_goal_and_goes_on_when_the_goal_is_raised(
    make_driver: MakeDriver,
) -> None:
    goal = {"stop_metric": "sampled", "stop_threshold": 0.0}
    driver = make_driver(settings={"evaluation": {**EVALUATION, **goal}, "grpo": {"max_num_steps": 40}})
    assert driver.run() == 0, driver.errors
    footer = newest_footer(driver.store, steps_only=True)
    assert footer is not None and 2 <= footer.name.step < 40
    ended = footer.name.step
    assert newest_manifest(driver.store).step == ended
    assert evaluated(driver.store)[-1] == ended
    assert "reached evaluation.stop_threshold=0 in sampled" in driver.errors
    assert attempts(driver.store) == 1 and driver.orphans() == []

    assert driver.run() == 0, driver.errors
    assert attempts(driver.store) == 1, "a run that reached its goal has nothing left to do"
    assert f"finished: {ended} steps" in driver.output

    driver.recipe["evaluation"] = {**driver.recipe["evaluation"], "stop_threshold": 2.0}
    driver.recipe["grpo"] = {**driver.recipe["grpo"], "max_num_steps": ended + 2}
    assert driver.run() == 0, driver.errors
    assert attempts(driver.store) == 2
    assert_sound(driver)
