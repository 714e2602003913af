"""The schedule on a virtual clock: it keeps its bound, its pace and its accounts, whatever goes wrong.

Unless said otherwise as in the comparison of rules in the literature: 64 rollouts a step, a step of one second,
rollouts of two seconds in the mean and 160 places for them, a quarter more than a trainer that never waits needs.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from functools import cache

import pytest

from grpo_core.schedule.baselines import baselines
from grpo_core.schedule.outcome import Outcome
from grpo_core.schedule.pool_model import PoolModel
from grpo_core.schedule.rules import Windowed
from grpo_core.schedule.scenario import EngineDeath, FlowModel, Scenario, TrainerCrash, TrainerModel
from grpo_core.schedule.simulate import Simulation, Stalled, simulate
from grpo_core.schedule.window import Window
from grpo_core.schedule.workload import LogNormal, Workload

SPEED = 1000.0
GATES = {1.0: 4, 1.5: 8}
RATIOS = {1.0: 0.94, 1.5: 0.93}


def scenario(sigma: float, max_age: int, *, places: int = 160, seconds: float = 2.0, steps: int = 200) -> Scenario:
    lengths = LogNormal(seconds * SPEED, sigma)
    return Scenario(
        Workload(lengths, seed=1), PoolModel(1, places, SPEED), TrainerModel(64, step_seconds=1.0), steps, max_age
    )


def window(case: Scenario, **changes: object) -> Window:
    fields = {
        "prompts_per_step": case.trainer.prompts_per_step,
        "max_age": case.max_age,
        "every_steps": case.trainer.every_steps,
        "steps": 10**9,
    }
    return Window(**{**fields, **changes})  # type: ignore[arg-type]


def ours(case: Scenario, **changes: object) -> Outcome:
    return simulate(case, lambda: Windowed(window(case, **changes)))


@cache
def theirs(sigma: float) -> dict[str, Outcome]:
    """Every baseline rule in the same scenario."""
    case = scenario(sigma, GATES[sigma], steps=100)
    rules = baselines(case.trainer.prompts_per_step, case.max_age)
    return {name: simulate(case, lambda rule=rule: rule) for name, rule in rules.items()}


@pytest.mark.parametrize("sigma", GATES)
def test_trainer_bound_and_lengths_are_kept_at_once(sigma: float) -> None:
    outcome = ours(scenario(sigma, GATES[sigma]))
    assert outcome.efficiency >= 0.97
    assert outcome.lag.max <= GATES[sigma]
    assert outcome.length_ratio >= RATIOS[sigma]
    assert outcome.wasted_groups == 0 and outcome.wasted_fraction == 0
    assert outcome.over_window == 0
    # What it costs: tokens at the front of the longest rollouts get no gradient.
    assert 0.1 < outcome.masked_fraction < 0.25


@pytest.mark.parametrize("sigma", GATES)
def test_each_other_rule_gives_one_of_them_up(sigma: float) -> None:
    found, max_age = theirs(sigma), GATES[sigma]
    for name in ("exact target (NeMo RL)", "wait (verl)"):
        assert found[name].efficiency < 0.35 and found[name].lag.max <= max_age
    for name in ("drop at pull (TRL)", "hard drop (prime-rl)"):
        assert found[name].wasted_fraction > 0.25 and found[name].length_ratio < 0.75
        assert found[name].efficiency > 0.95 and found[name].lag.max <= max_age
    aggregate = found["aggregate admission (AReaL, SkyRL)"]
    assert aggregate.over_window > 0.1 and aggregate.lag.max > 5 * max_age
    assert aggregate.efficiency > 0.95 and aggregate.wasted_groups == 0


@pytest.mark.parametrize("places", [64, 128, 256])
@pytest.mark.parametrize(("sigma", "max_age"), [(0.0, 4), (1.0, 4), (1.5, 8)])
def test_no_more_than_a_twentieth_is_lost_whichever_side_is_slower(places: int, sigma: float, max_age: int) -> None:
    """The trainer is twice as fast as the pool, as fast as it, and half as fast."""
    outcome = ours(scenario(sigma, max_age, places=places, steps=120))
    assert 0.95 <= outcome.efficiency <= 1.01
    assert outcome.lag.max <= max_age
    assert outcome.wasted_groups == 0


def test_mean_lag_follows_supply_and_an_exact_target_does_not() -> None:
    """Faster engines: our lag falls, while groups bound to a step wait for it the whole window long."""
    our_lag, our_age, their_age = [], [], []
    for seconds in (2.0, 1.0, 0.5):
        case = scenario(0.5, 4, seconds=seconds, steps=100)
        outcome = ours(case)
        our_lag.append(outcome.lag.mean)
        our_age.append(outcome.age_mean)
        exact = baselines(64, 4)["exact target (NeMo RL)"]
        their_age.append(simulate(case, lambda: exact).age_mean)
        assert outcome.efficiency >= 0.97
    assert our_lag[0] > our_lag[1] > our_lag[2]
    assert our_age[0] < 3.3 and our_age[2] < 2
    assert min(their_age) > 3.8


def test_the_whole_window_is_filled_unless_supply_is_followed() -> None:
    case = scenario(1.0, 4)
    whole = simulate(case, lambda: Windowed(window(case), follow_supply=False))
    assert whole.age_mean > 3.8 > ours(case).age_mean + 0.5
    assert whole.efficiency >= 0.97


def test_a_window_of_zero_generates_and_trains_by_turns() -> None:
    case = Scenario(
        Workload(LogNormal(300, 0), group_size=4),
        PoolModel(2, 8, 100.0),
        TrainerModel(4, step_seconds=1.5, seconds_per_token=1e-4, refit_seconds=0.25),
        steps=10,
        max_age=0,
        flow=FlowModel(lease_prompts=2, reward_seconds=0.5),
    )
    outcome = ours(case)
    assert outcome.wall_seconds == pytest.approx(10 * (3.0 + 0.5 + 1.5 + 16 * 300 * 1e-4) + 9 * 0.25)
    assert (outcome.lag.mean, outcome.lag.max) == (0, 0)


def test_groups_arrive_with_the_parts_of_their_lease() -> None:
    """Of a lease of three the first two groups wait for the flush, and the last for nothing."""
    case = Scenario(
        Workload(LogNormal(1, 0), group_size=1),
        PoolModel(1, 1, 1.0),
        TrainerModel(1, step_seconds=0.0),
        steps=3,
        max_age=2,
        flow=FlowModel(lease_prompts=3, flush_seconds=2.5),
    )
    simulation = Simulation(case, lambda: Windowed(window(case)))
    assert simulation.run().wall_seconds == 3.0
    assert ours(Scenario(*(getattr(case, name) for name in ("workload", "pool", "trainer")), 1, 2)).wall_seconds == 1.0
    slow = Scenario(case.workload, case.pool, case.trainer, 1, 2, case.flow)
    assert ours(slow).wall_seconds == 2.5


def test_a_refit_that_drains_leaves_every_rollout_to_one_version() -> None:
    case = scenario(1.0, 2, steps=40)
    draining = Scenario(
        case.workload, case.pool, TrainerModel(64, 1.0, refit_seconds=0.1, drain=True), case.steps, case.max_age
    )
    versions = []
    for each in (case, draining):
        simulation = Simulation(each, lambda: Windowed(window(each)))
        simulation.run()
        versions.append({len(group.tokens) for record in simulation.records for group in record.groups})
    assert versions[0] > {1, 2, 3} and versions[1] == {1}


def test_a_version_may_be_trained_for_several_steps() -> None:
    case = scenario(1.0, 2, steps=90)
    slow = Scenario(case.workload, case.pool, TrainerModel(64, 1.0, every_steps=3), case.steps, case.max_age)
    simulation = Simulation(slow, lambda: Windowed(window(slow)))
    outcome = simulation.run()
    assert [record.version for record in simulation.records[:7]] == [0, 0, 0, 1, 1, 1, 2]
    assert outcome.lag.max <= 2 and outcome.efficiency >= 0.97


@pytest.mark.parametrize(("policy", "wasted"), [("wait", False), ("drop", True)])
def test_the_other_policies_for_stale_groups_mask_nothing(policy: str, wasted: bool) -> None:
    outcome = ours(scenario(1.0, 4, steps=60), stale_policy=policy)
    assert outcome.masked_fraction == 0 and outcome.lag.max <= 4
    assert (outcome.wasted_groups > 0) is wasted


def test_in_order_trains_every_group_at_the_step_it_was_leased_for() -> None:
    case = scenario(1.0, 2, steps=30)
    simulation = Simulation(case, lambda: Windowed(window(case, sampler="in_order")))
    simulation.run()
    for record in simulation.records:
        assert sorted(group.ordinal for group in record.groups) == list(range(64 * (record.step - 1), 64 * record.step))


def test_equal_seeds_give_equal_figures() -> None:
    case = scenario(1.0, 4, steps=40)
    assert ours(case) == ours(case)
    other = Scenario(Workload(case.workload.lengths, seed=2), case.pool, case.trainer, case.steps, case.max_age)
    assert ours(case) != ours(other)


def test_a_rule_that_leases_nothing_is_found_out() -> None:
    case = scenario(1.0, 4)
    with pytest.raises(Stalled, match="before step 3 of 200"):
        ours(case, steps=2)


def faulty(seed: int) -> Scenario:
    """A run in which engines die, groups fail and the trainer crashes, at any time."""
    rng = random.Random(seed)
    deaths = [EngineDeath(rng.uniform(0, 80), rng.randrange(3), rng.uniform(0, 10)) for _ in range(6)]
    crashes = [TrainerCrash(rng.uniform(0, 80), rng.uniform(0, 5)) for _ in range(4)]
    return Scenario(
        Workload(LogNormal(2000, 1.0), group_size=4, failure_rate=0.3, zero_variance_rate=0.2, seed=seed),
        PoolModel(3, 16, SPEED, 12 * SPEED),
        TrainerModel(
            8,
            step_seconds=1.0,
            every_steps=rng.choice((1, 2)),
            refit_seconds=0.1,
            drain=rng.random() < 0.3,
            save_period=rng.choice((1, 5, 10)),
        ),
        steps=40,
        max_age=rng.choice((1, 2, 4)),
        flow=FlowModel(lease_prompts=2, reward_seconds=0.1, flush_seconds=0.5, max_attempts=2),
        faults=(*deaths, *crashes),
    )


@pytest.mark.parametrize("policy", ["mask", "drop"])
@pytest.mark.parametrize("sampler", ["windowed", "in_order", "freshest"])
@pytest.mark.parametrize("seed", range(4))
def test_every_ordinal_is_accounted_for_whatever_goes_wrong(seed: int, sampler: str, policy: str) -> None:
    case = faulty(seed)
    simulation = Simulation(case, lambda: Windowed(window(case, sampler=sampler, stale_policy=policy, refills=16)))
    outcome = simulation.run()
    frontier = simulation.frontier
    trained = Counter(group.ordinal for record in simulation.records for group in record.groups)
    counts = frontier.counts()
    assert [record.step for record in simulation.records] == list(range(1, 41))
    assert set(trained.values()) == {1} and len(trained) == counts.trained == 40 * 8
    assert all(state in ("trained", "dropped", "settled") for state in map(frontier.state, trained))
    below = set(range(frontier.frontier))
    assert len(below - trained.keys()) <= sum(counts.dropped.values())
    assert counts.leased == frontier.next_ordinal
    assert set(counts.dropped) == {"generation_failed", "zero_variance"}
    assert outcome.lag.max <= case.max_age
    tokens = math.fsum(group.generated for record in simulation.records for group in record.groups)
    assert simulation.generated == pytest.approx(simulation.wasted_tokens + tokens + simulation.open_tokens())
    assert outcome.wasted_groups > 0


def test_a_crash_loses_the_steps_since_the_checkpoint_and_nothing_else() -> None:
    case = scenario(0.0, 2, steps=30)
    crashing = Scenario(
        case.workload, case.pool, case.trainer, case.steps, case.max_age, faults=(TrainerCrash(17.5, 3.0),)
    )
    calm, shaken = (Simulation(each, lambda: Windowed(window(case))) for each in (case, crashing))
    before, after = calm.run(), shaken.run()
    assert 3 < after.wall_seconds - before.wall_seconds < 12
    assert [record.step for record in shaken.records] == list(range(1, 31))
    assert after.wasted_groups > 0 and before.wasted_groups == 0
