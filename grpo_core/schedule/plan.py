"""The capacity planner: from a recipe and a few speeds to expected utilisation, lag and waste, and to what would be
better. Pure: no store, no clock; the verb `forebay plan` reads the speeds and prints the result.

Large steps are simulated at a smaller scale: prompts per step, slots and an engine's speed are divided by the same
number, which keeps every ratio that matters and makes the fluctuations a little larger than they will be. Everything
else is as in `simulate`, with the same limits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from grpo_core.config import ExternalPool, RunConfig
from grpo_core.schedule.outcome import Outcome
from grpo_core.schedule.pool_model import PoolModel
from grpo_core.schedule.rates import Rates, slots_of
from grpo_core.schedule.rules import Windowed
from grpo_core.schedule.scenario import FlowModel, Scenario, TrainerModel
from grpo_core.schedule.simulate import simulate
from grpo_core.schedule.window import Window
from grpo_core.schedule.workload import Workload

STEPS = 100
SCALED_ROLLOUTS = 256
ENDLESS = 10**9
WINDOWS = (1, 2, 4, 8, 16)
# How many engines are tried, as multiples of the fewest whose full speed the trainer could use.
ENGINES = (1.0, 1.25, 1.5, 2.0)
# With this efficiency one side is as busy as it gets, and a wider window would not help it.
BUSY = 0.98
# Less than this share of the best speed of all that was tried is worth another engine or a wider window.
CLOSE = 0.97
# More of the generated tokens without a gradient than this, and the advice says what to do about it.
MASKED = 0.1


@dataclass(frozen=True, slots=True)
class Choice:
    """A pool of `engines` and a window, and what the simulation makes of them."""

    engines: int
    window: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Plan:
    """The recipe as it is, the choice that is advised, everything that was tried, and advice in sentences."""

    rates: Rates
    current: Choice
    advised: Choice
    tried: tuple[Choice, ...]
    advice: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The public contract of `forebay plan --json`: the recipe's own figures at the top level."""
        return {
            **_figures(self.current),
            "advised": _figures(self.advised),
            "tried": [_figures(choice) for choice in self.tried],
            "rates": self.rates.to_json(),
            "advice": list(self.advice),
        }


def plan(config: RunConfig, rates: Rates) -> Plan:
    """Simulate the recipe and its neighbours."""
    current = _choice(config, rates, _engines(config), config.grpo.async_grpo.max_trajectory_age_steps)
    tried = {(current.engines, current.window): current}
    for engines in _candidates(config, rates):
        for window in WINDOWS:
            choice = tried.get((engines, window)) or _choice(config, rates, engines, window)
            tried[engines, window] = choice
            if choice.outcome.efficiency > BUSY:
                break
    advised = _best(tried.values())
    in_order = tuple(tried[key] for key in sorted(tried))
    return Plan(rates, current, advised, in_order, tuple(_advice(current, advised, rates)))


def scenario_of(config: RunConfig, rates: Rates, *, engines: int, window: int) -> Scenario:
    """The recipe with so many engines and this window, at the scale that is simulated."""
    grpo = config.grpo
    rollouts = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    prompts = max(1, round(grpo.num_prompts_per_step * min(1.0, SCALED_ROLLOUTS / rollouts)))
    scale = prompts / grpo.num_prompts_per_step
    return Scenario(
        workload=Workload(rates.lengths, grpo.num_generations_per_prompt, seed=config.seed),
        pool=PoolModel(
            engines=engines,
            slots=max(1, round(slots_of(config) * scale)),
            tokens_per_second=rates.sequence_tokens_per_second,
            most_tokens_per_second=rates.engine_tokens_per_second * scale,
        ),
        trainer=TrainerModel(
            prompts_per_step=prompts,
            step_seconds=rates.step_seconds,
            every_steps=config.refit.every_steps,
            refit_seconds=rates.refit_seconds,
            drain=not grpo.async_grpo.in_flight_weight_updates,
        ),
        flow=FlowModel(
            lease_prompts=max(1, round(config.lease_prompts * scale)),
            flush_seconds=config.generation.flush_seconds,
            max_attempts=config.generation.max_rollout_attempts,
        ),
        steps=STEPS * config.refit.every_steps,
        max_age=window,
    )


def _choice(config: RunConfig, rates: Rates, engines: int, window: int) -> Choice:
    scenario = scenario_of(config, rates, engines=engines, window=window)
    asynchronous = config.grpo.async_grpo
    schedule = Window(
        prompts_per_step=scenario.trainer.prompts_per_step,
        max_age=window,
        every_steps=scenario.trainer.every_steps,
        steps=ENDLESS,
        sampler=asynchronous.sampler,
        stale_policy=asynchronous.stale_policy,
    )
    return Choice(engines, window, simulate(scenario, lambda: Windowed(schedule)))


def _engines(config: RunConfig) -> int:
    return len(config.pool.urls) if isinstance(config.pool, ExternalPool) else config.pool.engines


def _candidates(config: RunConfig, rates: Rates) -> list[int]:
    """Numbers of engines worth trying: around the one at which pool and trainer are equally fast."""
    grpo = config.grpo
    tokens = grpo.num_prompts_per_step * grpo.num_generations_per_prompt * rates.lengths.mean
    peak = scenario_of(config, rates, engines=1, window=0).pool.peak
    scaled = tokens * min(1.0, SCALED_ROLLOUTS / (grpo.num_prompts_per_step * grpo.num_generations_per_prompt))
    balanced = scaled / (rates.step_seconds + rates.refit_seconds / config.refit.every_steps) / peak
    return sorted({max(1, math.ceil(balanced * factor)) for factor in ENGINES} | {_engines(config)})


def _best(tried: Collection[Choice]) -> Choice:
    """The fewest engines, then the smallest window, that are nearly as fast as the fastest."""
    fastest = max(choice.outcome.steps_per_hour for choice in tried)
    return min(
        (choice for choice in tried if choice.outcome.steps_per_hour >= CLOSE * fastest),
        key=lambda choice: (choice.engines, choice.window),
    )


def _advice(current: Choice, advised: Choice, rates: Rates) -> Iterable[str]:
    now, then = current.outcome, advised.outcome
    if (current.engines, current.window) == (advised.engines, advised.window):
        yield f"Keep {_name(current)}: nothing that was tried is more than {1 - CLOSE:.0%} faster or does with less."
    elif then.steps_per_hour < now.steps_per_hour / CLOSE:
        yield (
            f"{_name(advised)} would do as well as {_name(current)}: {then.steps_per_hour:.1f} instead of "
            f"{now.steps_per_hour:.1f} steps per hour, with a mean lag of {then.lag.mean:.1f} instead of {now.lag.mean:.1f}."
        )
    else:
        yield (
            f"Take {_name(advised)} instead of {_name(current)}: {then.steps_per_hour:.1f} instead of "
            f"{now.steps_per_hour:.1f} steps per hour, the trainer busy {then.trainer:.0%} instead of {now.trainer:.0%} "
            f"of the time, mean lag {then.lag.mean:.1f} instead of {now.lag.mean:.1f}."
        )
    if now.efficiency < BUSY and current.window < advised.window:
        yield (
            f"With the window of {current.window} both sides wait: long rollouts hold back steps that others could fill; "
            "raise grpo.async_grpo.max_trajectory_age_steps."
        )
    if now.pool > BUSY:
        yield f"The pool is the bottleneck: it is busy {now.pool:.0%} of the time, the trainer {now.trainer:.0%}."
    if then.masked_fraction > MASKED:
        yield (
            f"{then.masked_fraction:.0%} of the trained groups' tokens are older than the window of {advised.window} and get no "
            "gradient: a wider window, shorter completions or faster sequences would keep more of them."
        )
    if rates.assumed:
        yield f"Assumed, not measured: {', '.join(rates.assumed)}; give them, or --from a run that was."


def _name(choice: Choice) -> str:
    engines = "1 engine" if choice.engines == 1 else f"{choice.engines} engines"
    return f"{engines} and a window of {choice.window}"


def _figures(choice: Choice) -> dict[str, Any]:
    return {"engines": choice.engines, "window": choice.window, **choice.outcome.to_json()}
