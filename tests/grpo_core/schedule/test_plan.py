"""The plan says what to expect of a recipe, and what would be better."""

from __future__ import annotations

import json

import pytest

from grpo_core.config import RunConfig
from grpo_core.schedule.plan import SCALED_ROLLOUTS, Plan, plan, scenario_of
from grpo_core.schedule.rates import Rates
from grpo_core.schedule.workload import LogNormal

CONTRACT = {
    "utilisation", "efficiency", "lag", "wasted_fraction", "masked_fraction", "length_ratio", "steps_per_hour", "advice",
}  # fmt: skip


def recipe(engines: int = 1, window: int = 2, prompts: int = 16, generations: int = 4, **more: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "grpo": {
                "num_prompts_per_step": prompts,
                "num_generations_per_prompt": generations,
                "async_grpo": {"max_trajectory_age_steps": window, **more},
            },
            "generation": {"flush_seconds": 0.05},
            "pool": {"kind": "local", "engines": engines, "max_num_seqs": 32},
        }
    )


def rates(sigma: float = 0.5, step_seconds: float = 8.0) -> Rates:
    """64 rollouts of 500 tokens a step; an engine makes 1600 tokens per second: 20 seconds for one step's rollouts."""
    return Rates(100.0, 1600.0, step_seconds, 0.2, LogNormal(500.0, sigma))


@pytest.fixture(scope="module")
def starved() -> Plan:
    return plan(recipe(), rates())


def test_a_starved_trainer_is_given_engines(starved: Plan) -> None:
    assert starved.current.outcome.pool > 0.98 and starved.current.outcome.trainer < 0.5
    assert 3 <= starved.advised.engines <= 6
    assert starved.advised.outcome.trainer > 0.93
    assert starved.advised.outcome.steps_per_hour > 2 * starved.current.outcome.steps_per_hour
    first, *others = starved.advice
    assert first.startswith(f"Take {starved.advised.engines} engines and a window of {starved.advised.window} instead")
    assert any("pool is the bottleneck" in sentence for sentence in others)


def test_the_advice_wins_with_the_least(starved: Plan) -> None:
    """Whatever was tried and is about as fast takes more engines or a wider window."""
    fast = [
        c
        for c in starved.tried
        if c.outcome.steps_per_hour >= 0.97 * max(t.outcome.steps_per_hour for t in starved.tried)
    ]
    assert min((c.engines, c.window) for c in fast) == (starved.advised.engines, starved.advised.window)
    assert [(c.engines, c.window) for c in starved.tried] == sorted({(c.engines, c.window) for c in starved.tried})


def test_the_figures_have_the_names_of_the_contract(starved: Plan) -> None:
    found = json.loads(json.dumps(starved.to_json()))
    assert set(found) >= CONTRACT
    assert set(found["utilisation"]) == {"trainer", "pool"} and set(found["lag"]) == {"mean", "p95", "max"}
    assert found["engines"] == 1 and found["advised"]["engines"] == starved.advised.engines
    assert found["advice"] and all(isinstance(sentence, str) for sentence in found["advice"])


def test_a_recipe_that_is_right_is_left_alone(starved: Plan) -> None:
    again = plan(recipe(engines=starved.advised.engines, window=starved.advised.window), rates())
    assert again.advised == again.current
    assert again.advice[0].startswith("Keep ")


def test_a_window_too_narrow_for_the_longest_rollouts_is_widened() -> None:
    found = plan(recipe(engines=6, window=1), rates(sigma=1.2))
    assert found.advised.window > 1
    assert found.advised.outcome.steps_per_hour > found.current.outcome.steps_per_hour
    assert any("raise grpo.async_grpo.max_trajectory_age_steps" in sentence for sentence in found.advice)


def test_a_pool_that_is_larger_than_it_needs_to_be_is_found_out(starved: Plan) -> None:
    found = plan(recipe(engines=3 * starved.advised.engines, window=4), rates())
    assert (found.advised.engines, found.advised.window) < (found.current.engines, found.current.window)
    assert "would do as well as" in found.advice[0]


def test_what_was_assumed_is_said() -> None:
    assumed = Rates(100.0, 1600.0, 8.0, 0.0, LogNormal(500.0, 0), assumed=("sigma",))
    assert "Assumed, not measured: sigma" in plan(recipe(engines=4), assumed).advice[-1]


def test_large_steps_are_simulated_at_a_smaller_scale() -> None:
    config = recipe(prompts=512, generations=8)
    case = scenario_of(config, rates(), engines=3, window=2)
    small = scenario_of(recipe(prompts=16, generations=8), rates(), engines=3, window=2)
    assert case.trainer.prompts_per_step * 8 == SCALED_ROLLOUTS
    assert small.trainer.prompts_per_step == 16
    scale = SCALED_ROLLOUTS / (512 * 8)
    assert case.pool.slots == 32 * scale and case.pool.most_tokens_per_second == 1600 * scale
    assert case.pool.tokens_per_second == 100.0 and case.pool.engines == 3
    assert case.flow.lease_prompts == config.lease_prompts * scale


def test_a_scenario_does_what_the_recipe_says() -> None:
    case = scenario_of(recipe(in_flight_weight_updates=False), rates(), engines=1, window=2)
    assert case.trainer.drain and case.flow.flush_seconds == 0.05 and case.max_age == 2
    assert not scenario_of(recipe(), rates(), engines=1, window=2).trainer.drain
