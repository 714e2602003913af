"""Generation never runs further ahead than the window allows, and a run ends with the last step its data fill."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.config import AsyncGRPOConfig, GRPOConfig, RefitConfig
from grpo_core.schedule.window import Window


def window(**changes: object) -> Window:
    fields = {"prompts_per_step": 2, "max_age": 2, "every_steps": 1, "steps": 100}
    return Window(**{**fields, **changes})  # type: ignore[arg-type]


@given(st.integers(1, 6), st.integers(1, 9))
def test_a_window_of_zero_is_synchronous(prompts: int, done: int) -> None:
    synchronous = window(max_age=0, prompts_per_step=prompts)
    assert synchronous.capacity(live_version=done, done=done, settled=0, open_ordinals=0) == prompts
    assert synchronous.capacity(live_version=done, done=done, settled=0, open_ordinals=prompts) == 0
    # The step is done but its weights are not yet in the engines: nothing may start.
    assert synchronous.capacity(live_version=done, done=done + 1, settled=0, open_ordinals=0) == 0


def test_capacity_ends_with_the_run() -> None:
    assert window(steps=10).capacity(live_version=9, done=9, settled=18, open_ordinals=0) == 2
    assert window(steps=10).capacity(live_version=10, done=10, settled=20, open_ordinals=0) == 0
    assert window(steps=1).capacity(live_version=0, done=0, settled=0, open_ordinals=7) == 0


def test_versions_advance_every_few_steps() -> None:
    slow = window(every_steps=3)
    assert [slow.training_version(step) for step in range(1, 8)] == [0, 0, 0, 1, 1, 1, 2]
    assert [slow.refit_due(step) for step in range(1, 8)] == [False, False, True, False, False, True, False]
    assert [slow.oldest_version(step) for step in (1, 7, 10, 13)] == [0, 0, 1, 2]


@given(
    prompts=st.integers(1, 5),
    max_age=st.integers(0, 4),
    every=st.integers(1, 3),
    live=st.integers(0, 9),
    back=st.integers(0, 3),
)
def test_what_is_leased_can_still_be_trained_by_every_step_it_may_wait_for(
    prompts: int, max_age: int, every: int, live: int, back: int
) -> None:
    schedule = window(prompts_per_step=prompts, max_age=max_age, every_steps=every)
    done = max(0, live * every - back)
    room = schedule.capacity(live_version=live, done=done, settled=0, open_ordinals=0)
    last = schedule.horizon(live_version=live, done=done, settled=0)
    assert room == (last - done) * prompts
    assert schedule.oldest_version(last) <= live < schedule.oldest_version(last + 1) or last == schedule.steps


def test_in_order_begins_with_a_target_for_each_step_of_the_window_and_adds_one_with_each_version() -> None:
    schedule = window(sampler="in_order", prompts_per_step=3, max_age=2)
    assert list(schedule.shortfalls(live_version=0, done=0, settled=0, bound={})) == [(1, 3), (2, 3), (3, 3)]
    full = {1: 3, 2: 3, 3: 3}
    assert list(schedule.shortfalls(live_version=0, done=0, settled=0, bound=full)) == []
    assert list(schedule.shortfalls(live_version=1, done=1, settled=3, bound={2: 3, 3: 3})) == [(4, 3)]


def test_in_order_fills_up_an_incomplete_target_before_it_begins_a_new_one() -> None:
    schedule = window(sampler="in_order", prompts_per_step=3, max_age=2)
    bound = {30: 3, 32: 1}
    assert list(schedule.shortfalls(live_version=29, done=29, settled=87, bound=bound)) == [(31, 3), (32, 2)]


def test_a_drop_brings_the_end_of_the_data_nearer() -> None:
    schedule = window(prompts_per_step=4, prompts=10, epochs=1)
    assert schedule.last_step() == 2
    assert schedule.last_step(done=1, settled=4 + 2) == 2
    assert schedule.last_step(done=1, settled=4 + 3) == 1
    assert schedule.last_step(done=2, settled=10) == 2


def test_groups_beyond_the_last_whole_step_are_leased_only_in_place_of_dropped_ones() -> None:
    schedule = window(prompts_per_step=4, prompts=10, epochs=1)
    assert schedule.capacity(live_version=0, done=0, settled=0, open_ordinals=0) == 8
    assert schedule.capacity(live_version=0, done=0, settled=1, open_ordinals=7) == 1


def test_settings_come_from_the_run_config() -> None:
    grpo = GRPOConfig(
        num_prompts_per_step=5,
        max_num_steps=8,
        max_num_epochs=3,
        use_dynamic_sampling=True,
        dynamic_sampling_max_gen_batches=2,
        async_grpo=AsyncGRPOConfig(max_trajectory_age_steps=4, stale_policy="wait", sampler="in_order"),
    )
    assert Window.of(grpo, RefitConfig(every_steps=3), prompts=7) == Window(
        prompts_per_step=5,
        max_age=4,
        every_steps=3,
        steps=8,
        prompts=7,
        epochs=3,
        sampler="in_order",
        stale_policy="wait",
        refills=10,
    )


@pytest.mark.parametrize(
    ("steps", "epochs", "prompts", "last"),
    [(100, None, 10, 100), (100, 3, 10, 7), (5, 3, 10, 5), (5, 1, 3, 0), (5, 2, None, 5)],
)
def test_the_run_ends_with_its_steps_or_its_epochs(
    steps: int, epochs: int | None, prompts: int | None, last: int
) -> None:
    grpo = GRPOConfig(num_prompts_per_step=4, max_num_steps=steps, max_num_epochs=epochs)
    assert Window.of(grpo, RefitConfig(), prompts=prompts).last_step() == last


@given(st.integers(1, 5), st.integers(0, 40), st.lists(st.booleans(), max_size=60))
def test_the_end_never_moves_away_and_leaves_less_than_a_step(prompts: int, ordinals: int, dropped: list[bool]) -> None:
    """Whatever is dropped on the way, steps are made while whole ones are left and not one more."""
    schedule = window(prompts_per_step=prompts, prompts=ordinals, epochs=1, steps=1000)
    done, states = 0, Counter({"trained": 0, "dropped": 0})
    last = schedule.last_step()
    for drop in dropped:
        settled = states.total()
        assert (now := schedule.last_step(done=done, settled=settled)) <= last
        last = now
        if done == last:
            break
        if drop and settled < ordinals:
            states["dropped"] += 1
        elif settled + prompts <= ordinals:
            states["trained"] += prompts
            done += 1
    if done == schedule.last_step(done=done, settled=states.total()):
        assert ordinals - states.total() < prompts


def test_in_order_groups_that_have_no_step_left_serve_those_that_remain() -> None:
    """Twelve prompts in steps of four; one group of step 2 was dropped, so step 3 cannot be filled any more."""
    schedule = window(sampler="in_order", prompts_per_step=4, max_age=2, prompts=12, epochs=1)
    bound = {2: 3, 3: 4}
    assert list(schedule.shortfalls(live_version=1, done=1, settled=5, bound=bound)) == []
