"""Generation never runs further ahead than the window allows, and a step trains whole, admissible groups, oldest first."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_core.config import AsyncGRPOConfig, GRPOConfig, RefitConfig
from grpo_core.schedule.window import Candidate, Window, last_step


def window(**changes: object) -> Window:
    fields = {"prompts_per_step": 2, "max_age": 2, "every_steps": 1, "steps": 100, "stale_policy": "mask"}
    return Window(**{**fields, **changes})  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.integers(1, 5),
    max_age=st.integers(0, 4),
    every=st.integers(1, 3),
    steps=st.integers(1, 12),
    seed=st.integers(0, 10_000),
    overtaking=st.booleans(),
)
def test_no_more_is_open_than_the_window_can_train(
    prompts: int, max_age: int, every: int, steps: int, seed: int, overtaking: bool
) -> None:
    """Leases of any size. While no group overtakes another none goes stale; in any order every step is trained."""
    rng = random.Random(seed)
    schedule = window(prompts_per_step=prompts, max_age=max_age, every_steps=every, steps=steps)
    live, done, leased, trained, returned = 0, 0, 0, 0, 0
    in_flight: list[Candidate] = []
    buffered: list[Candidate] = []
    while done < steps:
        room = schedule.capacity(live_version=live, steps_done=done, open_ordinals=len(in_flight) + len(buffered))
        new = rng.randint(0, room) if buffered or in_flight else room
        in_flight += [Candidate(leased + place, live, live) for place in range(new)]
        leased += new
        trainable = [step for step in range(done + 1, steps + 1) if schedule.oldest_version(step) <= live]
        assert len(in_flight) + len(buffered) <= len(trainable) * prompts
        if overtaking:
            rng.shuffle(in_flight)
        arrived = rng.randint(1, len(in_flight)) if in_flight else 0
        buffered += in_flight[:arrived]
        del in_flight[:arrived]
        admission = schedule.admit(buffered, step=done + 1)
        decided = {*admission.trained, *admission.returned}
        buffered = [candidate for candidate in buffered if candidate.ordinal not in decided]
        returned += len(admission.returned)
        trained += len(admission.trained)
        assert room or arrived or decided, "the schedule is stuck"
        done += bool(admission.trained)
        live = done // every
    assert trained == steps * prompts
    assert overtaking or (returned == 0 and leased == trained)


@given(st.integers(1, 6), st.integers(1, 9))
def test_a_window_of_zero_is_synchronous(prompts: int, done: int) -> None:
    synchronous = window(max_age=0, prompts_per_step=prompts)
    assert synchronous.capacity(live_version=done, steps_done=done, open_ordinals=0) == prompts
    assert synchronous.capacity(live_version=done, steps_done=done, open_ordinals=prompts) == 0
    # The step is done but its weights are not yet in the engines: nothing may start.
    assert synchronous.capacity(live_version=done, steps_done=done + 1, open_ordinals=0) == 0


def test_capacity_ends_with_the_run() -> None:
    assert window(steps=10).capacity(live_version=9, steps_done=9, open_ordinals=0) == 2
    assert window(steps=10).capacity(live_version=10, steps_done=10, open_ordinals=0) == 0
    assert window(steps=1).capacity(live_version=0, steps_done=0, open_ordinals=7) == 0


def test_versions_advance_every_few_steps() -> None:
    slow = window(every_steps=3)
    assert [slow.training_version(step) for step in range(1, 8)] == [0, 0, 0, 1, 1, 1, 2]
    assert [slow.refit_due(step) for step in range(1, 8)] == [False, False, True, False, False, True, False]
    assert [slow.oldest_version(step) for step in (1, 7, 10, 13)] == [0, 0, 1, 2]


def test_the_oldest_weights_are_trained_first_and_then_the_lowest_ordinal() -> None:
    candidates = [Candidate(1, 3, 3), Candidate(9, 2, 3), Candidate(4, 2, 4), Candidate(0, 3, 4)]
    admission = window(prompts_per_step=3).admit(candidates, step=5)
    assert admission.trained == (4, 9, 0)
    assert not admission.returned and not admission.dropped


def test_too_few_groups_train_nothing_but_the_others_are_decided() -> None:
    candidates = [Candidate(0, 5, 5), Candidate(1, 0, 1), Candidate(2, 5, 5, "failed")]
    admission = window().admit(candidates, step=6)
    assert admission.trained == ()
    assert (admission.returned, admission.dropped) == ({1: "stale"}, {2: "failed"})


@pytest.mark.parametrize(("policy", "returned"), [("mask", {}), ("drop", {0: "stale"})])
def test_a_partly_stale_group_is_masked_or_returned(policy: str, returned: dict[int, str]) -> None:
    admission = window(stale_policy=policy, prompts_per_step=1).admit([Candidate(0, 1, 4)], step=6)
    assert admission.returned == returned
    assert admission.trained == (() if returned else (0,))


def test_a_group_exactly_at_the_window_is_trained() -> None:
    for policy in ("mask", "drop"):
        admission = window(stale_policy=policy, prompts_per_step=1).admit([Candidate(0, 3, 3)], step=6)
        assert admission.trained == (0,)


def test_a_failed_group_is_dropped_even_when_it_is_stale() -> None:
    assert window().admit([Candidate(0, 0, 0, "EngineUnavailable: gone")], step=9).dropped == {
        0: "EngineUnavailable: gone"
    }


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=20),
    st.integers(1, 12),
    st.sampled_from(["mask", "drop"]),
)
def test_no_trained_group_is_wholly_stale_and_every_decision_is_single(
    spans: list[tuple[int, int]], step: int, policy: str
) -> None:
    settings_ = window(stale_policy=policy)
    candidates = [Candidate(number, oldest, oldest + width) for number, (oldest, width) in enumerate(spans)]
    admission = settings_.admit(candidates, step=step)
    oldest = settings_.training_version(step) - settings_.max_age
    for ordinal in admission.trained:
        bound = candidates[ordinal].newest_version if policy == "mask" else candidates[ordinal].oldest_version
        assert bound >= oldest
    assert len(admission.trained) in (0, settings_.prompts_per_step)
    assert not set(admission.trained) & set(admission.returned)


def test_a_group_of_foreign_weights_goes_back_whatever_its_version() -> None:
    schedule = window(prompts_per_step=1)
    ahead = schedule.admit([Candidate(0, 4, 6), Candidate(1, 5, 5, foreign=True), Candidate(2, 5, 5)], step=6)
    assert ahead.returned == {0: "foreign version", 1: "foreign version"} and ahead.trained == (2,)
    assert schedule.admit([Candidate(0, 0, 0, "failed", foreign=True)], step=6).dropped == {0: "failed"}


def test_settings_come_from_the_run_config() -> None:
    grpo = GRPOConfig(
        num_prompts_per_step=5, async_grpo=AsyncGRPOConfig(max_trajectory_age_steps=4, stale_policy="drop")
    )
    assert Window.of(grpo, RefitConfig(every_steps=3), steps=8) == Window(5, 4, 3, 8, "drop")


@pytest.mark.parametrize(
    ("steps", "epochs", "prompts", "last"), [(100, None, 10, 100), (100, 3, 10, 7), (5, 3, 10, 5), (5, 1, 3, 0)]
)
def test_the_run_ends_with_its_steps_or_its_epochs(steps: int, epochs: int | None, prompts: int, last: int) -> None:
    grpo = GRPOConfig(num_prompts_per_step=4, max_num_steps=steps, max_num_epochs=epochs)
    assert last_step(grpo, prompts=prompts) == last
