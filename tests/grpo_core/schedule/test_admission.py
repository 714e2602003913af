"""A step trains whole, admissible groups; what it cannot train is decided; nothing is waited for without end."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_core.schedule.admission import Admission, Admissions, Candidate, NothingAdmissible
from grpo_core.schedule.window import Window
from tests.grpo_core.schedule.test_window import window


def decide(
    schedule: Window, candidates: list[Candidate], *, step: int, hopeless: int = 1000, **changes: object
) -> Admission:
    return Admissions(schedule, hopeless).decide(candidates, step=step, last_step=schedule.steps, **changes)  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.integers(1, 5),
    max_age=st.integers(0, 4),
    every=st.integers(1, 3),
    steps=st.integers(1, 12),
    seed=st.integers(0, 10_000),
    overtaking=st.booleans(),
    sampler=st.sampled_from(["windowed", "freshest"]),
)
def test_no_more_is_open_than_the_window_can_train(
    prompts: int, max_age: int, every: int, steps: int, seed: int, overtaking: bool, sampler: str
) -> None:
    """Leases of any size. While no group overtakes another none goes stale; in any order every step is trained."""
    rng = random.Random(seed)
    schedule = window(prompts_per_step=prompts, max_age=max_age, every_steps=every, steps=steps, sampler=sampler)
    admissions = Admissions(schedule, hopeless_groups=10_000)
    live, done, leased, trained, returned = 0, 0, 0, 0, 0
    in_flight: list[Candidate] = []
    buffered: list[Candidate] = []
    while done < steps:
        opened = len(in_flight) + len(buffered)
        room = schedule.capacity(live_version=live, done=done, settled=trained, open_ordinals=opened)
        new = rng.randint(0, room) if opened else room
        in_flight += [Candidate(leased + place, live, live) for place in range(new)]
        leased += new
        trainable = [step for step in range(done + 1, steps + 1) if schedule.oldest_version(step) <= live]
        assert len(in_flight) + len(buffered) <= len(trainable) * prompts
        if overtaking:
            rng.shuffle(in_flight)
        arrived = rng.randint(1, len(in_flight)) if in_flight else 0
        buffered += in_flight[:arrived]
        del in_flight[:arrived]
        admission = admissions.decide(buffered, step=done + 1, last_step=steps)
        decided = {*admission.trained, *admission.returned}
        buffered = [candidate for candidate in buffered if candidate.ordinal not in decided]
        returned += len(admission.returned)
        trained += len(admission.trained)
        assert room or arrived or decided, "the schedule is stuck"
        done += bool(admission.trained)
        live = done // every
    assert trained == steps * prompts
    assert overtaking or sampler == "freshest" or (returned == 0 and leased == trained)


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.integers(1, 4),
    max_age=st.integers(0, 3),
    steps=st.integers(1, 10),
    seed=st.integers(0, 10_000),
)
def test_waiting_for_open_leases_leaves_nothing_stale(prompts: int, max_age: int, steps: int, seed: int) -> None:
    """Under `wait` no group is ever returned or masked, in whatever order the leases come back."""
    rng = random.Random(seed)
    schedule = window(prompts_per_step=prompts, max_age=max_age, steps=steps, stale_policy="wait")
    admissions = Admissions(schedule, hopeless_groups=10_000)
    done, leased = 0, 0
    in_flight: list[Candidate] = []
    buffered: list[Candidate] = []
    while done < steps:
        opened = len(in_flight) + len(buffered)
        room = schedule.capacity(live_version=done, done=done, settled=done * prompts, open_ordinals=opened)
        in_flight += [Candidate(leased + place, done, done) for place in range(room)]
        leased += room
        rng.shuffle(in_flight)
        arrived = rng.randint(1, len(in_flight)) if in_flight else 0
        buffered += in_flight[:arrived]
        del in_flight[:arrived]
        coming = Counter(candidate.oldest_version for candidate in in_flight)
        admission = admissions.decide(buffered, step=done + 1, in_flight=coming, last_step=steps)
        assert admission.trained or in_flight, "nothing is left to wait for"
        assert not admission.returned
        for ordinal in admission.trained:
            chosen = next(candidate for candidate in buffered if candidate.ordinal == ordinal)
            assert done - chosen.oldest_version <= max_age
        buffered = [candidate for candidate in buffered if candidate.ordinal not in admission.trained]
        done += bool(admission.trained)


def test_a_long_open_lease_holds_back_the_step_after_which_it_would_be_stale() -> None:
    schedule = window(prompts_per_step=1, max_age=2, stale_policy="wait")
    fresh = [Candidate(5, 3, 3)]
    assert decide(schedule, fresh, step=4, in_flight={2: 1}).trained == (5,)
    assert decide(schedule, fresh, step=4, in_flight={1: 1}).trained == ()
    # Once it was sealed, it is open no longer, and the step goes on.
    assert decide(schedule, fresh, step=4, in_flight={}).trained == (5,)


def test_a_step_is_held_back_while_more_is_in_flight_than_the_later_steps_have_room_for() -> None:
    schedule = window(prompts_per_step=1, max_age=2, stale_policy="wait")
    assert decide(schedule, [Candidate(5, 3, 3)], step=4, in_flight={2: 2}).trained == ()
    assert decide(schedule, [Candidate(5, 2, 2)], step=4, in_flight={2: 1, 3: 1}).trained == (5,)
    assert decide(window(prompts_per_step=1, max_age=2), [Candidate(5, 3, 3)], step=4, in_flight={1: 9}).trained


def test_the_last_step_waits_for_nobody() -> None:
    schedule = window(prompts_per_step=1, max_age=0, steps=4, stale_policy="wait")
    assert decide(schedule, [Candidate(5, 3, 3)], step=4, in_flight={3: 1}).trained == (5,)


def test_the_oldest_weights_are_trained_first_and_then_the_lowest_ordinal() -> None:
    candidates = [Candidate(1, 3, 3), Candidate(9, 2, 3), Candidate(4, 2, 4), Candidate(0, 3, 4)]
    admission = decide(window(prompts_per_step=3), candidates, step=5)
    assert admission.trained == (4, 9, 0)
    assert admission.admissible == 4
    assert not admission.returned and not admission.dropped


def test_the_freshest_weights_are_trained_first_when_asked_for() -> None:
    candidates = [Candidate(1, 3, 3), Candidate(9, 2, 3), Candidate(4, 2, 4), Candidate(0, 3, 4)]
    assert decide(window(prompts_per_step=3, sampler="freshest"), candidates, step=5).trained == (0, 1, 4)


def test_a_step_in_order_trains_exactly_the_groups_leased_for_it() -> None:
    schedule = window(sampler="in_order", max_age=2)
    candidates = [
        Candidate(0, 3, 3, target_step=5),
        Candidate(1, 4, 4, target_step=6),
        Candidate(2, 3, 3, target_step=5),
        Candidate(3, 2, 2, target_step=3),
    ]
    admission = decide(schedule, candidates, step=5, bound={6: 2})
    assert admission.trained == (0, 2)
    assert admission.returned == {3: "past target"}
    assert decide(schedule, candidates[:2], step=5, bound={6: 2}).trained == (), "never borrows from another target"


def test_a_group_that_will_be_stale_at_its_target_goes_back_at_once() -> None:
    schedule = window(sampler="in_order", max_age=1)
    assert decide(schedule, [Candidate(0, 2, 2, target_step=6)], step=4).returned == {0: "stale"}
    assert decide(schedule, [Candidate(0, 4, 4, target_step=6)], step=5).returned == {}


def test_the_first_step_in_order_waits_until_the_next_target_is_complete_or_claimed() -> None:
    schedule = window(sampler="in_order", prompts_per_step=1, max_age=1)
    candidates = [Candidate(60, 29, 29, target_step=30)]
    assert decide(schedule, candidates, step=30, bound={30: 1}).trained == ()
    admissions = Admissions(schedule, hopeless_groups=10)
    claimed = admissions.decide(candidates, step=30, bound={30: 1, 31: 1}, last_step=100)
    assert claimed.trained == (60,)
    # Only at the start: later the next version brings its target by itself.
    later = [Candidate(61, 30, 30, target_step=31)]
    assert admissions.decide(later, step=31, bound={31: 1}, last_step=100).trained == (61,)


@pytest.mark.parametrize(("max_age", "last_step"), [(0, 100), (1, 30)])
def test_the_start_in_order_waits_for_no_target_that_will_not_come(max_age: int, last_step: int) -> None:
    schedule = window(sampler="in_order", prompts_per_step=1, max_age=max_age)
    candidates = [Candidate(60, 29, 29, target_step=30)]
    admission = Admissions(schedule, 10).decide(candidates, step=30, bound={30: 1}, last_step=last_step)
    assert admission.trained == (60,)


def test_too_few_groups_train_nothing_but_the_others_are_decided() -> None:
    candidates = [Candidate(0, 5, 5), Candidate(1, 0, 1), Candidate(2, 5, 5, "failed")]
    admission = decide(window(), candidates, step=6)
    assert admission.trained == ()
    assert (admission.returned, admission.dropped) == ({1: "stale"}, {2: "failed"})


@pytest.mark.parametrize(("policy", "returned"), [("mask", {}), ("drop", {0: "stale"}), ("wait", {0: "stale"})])
def test_a_partly_stale_group_is_masked_or_returned(policy: str, returned: dict[int, str]) -> None:
    admission = decide(window(stale_policy=policy, prompts_per_step=1), [Candidate(0, 1, 4)], step=6)
    assert admission.returned == returned
    assert admission.trained == (() if returned else (0,))


def test_a_group_whose_tokens_are_all_stale_goes_back_even_under_mask() -> None:
    assert decide(window(prompts_per_step=1), [Candidate(0, 1, 2)], step=6).returned == {0: "stale"}


@pytest.mark.parametrize("policy", ["mask", "drop", "wait"])
def test_a_group_exactly_at_the_window_is_trained(policy: str) -> None:
    admission = decide(window(stale_policy=policy, prompts_per_step=1), [Candidate(0, 3, 3)], step=6)
    assert admission.trained == (0,)


def test_a_failed_group_is_dropped_even_when_it_is_stale() -> None:
    assert decide(window(), [Candidate(0, 0, 0, "EngineUnavailable: gone")], step=9).dropped == {
        0: "EngineUnavailable: gone"
    }


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=20),
    st.integers(1, 12),
    st.sampled_from(["mask", "drop", "wait"]),
    st.sampled_from(["windowed", "freshest"]),
)
def test_no_trained_group_is_wholly_stale_and_every_decision_is_single(
    spans: list[tuple[int, int]], step: int, policy: str, sampler: str
) -> None:
    schedule = window(stale_policy=policy, sampler=sampler)
    candidates = [Candidate(number, oldest, oldest + width) for number, (oldest, width) in enumerate(spans)]
    admission = decide(schedule, candidates, step=step)
    oldest = schedule.training_version(step) - schedule.max_age
    for ordinal in admission.trained:
        bound = candidates[ordinal].newest_version if policy == "mask" else candidates[ordinal].oldest_version
        assert bound >= oldest
    assert len(admission.trained) in (0, schedule.prompts_per_step)
    assert not set(admission.trained) & set(admission.returned)


def test_a_group_of_foreign_weights_goes_back_whatever_its_version() -> None:
    schedule = window(prompts_per_step=1)
    ahead = decide(schedule, [Candidate(0, 4, 6), Candidate(1, 5, 5, foreign=True), Candidate(2, 5, 5)], step=6)
    assert ahead.returned == {0: "foreign version", 1: "foreign version"} and ahead.trained == (2,)
    assert decide(schedule, [Candidate(0, 0, 0, "failed", foreign=True)], step=6).dropped == {0: "failed"}


def equal(ordinal: int) -> Candidate:
    return Candidate(ordinal, 0, 0, zero_variance=True)


def test_equal_rewards_are_trained_unless_dynamic_sampling_is_asked_for() -> None:
    assert decide(window(), [equal(0), equal(1)], step=1).trained == (0, 1)
    assert decide(window(refills=4), [equal(0), equal(1)], step=1).dropped == {0: "zero_variance", 1: "zero_variance"}


def test_beyond_its_refills_a_step_trains_what_comes_and_the_next_step_begins_anew() -> None:
    admissions = Admissions(window(refills=2), hopeless_groups=100)
    first = admissions.decide([equal(0), Candidate(1, 0, 0), equal(2), equal(3)], step=1, last_step=9)
    assert set(first.dropped) == {0, 2}
    assert first.trained == (1, 3)
    assert set(admissions.decide([equal(4)], step=2, last_step=9).dropped) == {4}


def test_batches_without_one_admissible_group_end_the_run_with_the_most_frequent_cause() -> None:
    admissions = Admissions(window(), hopeless_groups=5)
    admissions.decide([Candidate(0, 0, 0, "no reward"), Candidate(1, 0, 0, "timeout")], step=1, last_step=9)
    admissions.decide([Candidate(2, 0, 0, "no reward"), Candidate(3, 0, 0, "no reward")], step=1, last_step=9)
    with pytest.raises(NothingAdmissible, match="step 1: 5 groups in a row .* 3 of them for the reason 'no reward'"):
        admissions.decide([Candidate(4, 0, 0, "timeout")], step=1, last_step=9)


def test_one_admissible_group_starts_the_count_again() -> None:
    admissions = Admissions(window(), hopeless_groups=3)
    failures = [Candidate(number, 0, 0, "no reward") for number in range(2)]
    admissions.decide(failures, step=1, last_step=9)
    admissions.decide([Candidate(2, 0, 0), *failures], step=1, last_step=9)
    assert admissions.decide(failures, step=1, last_step=9).dropped


def test_in_order_a_group_whose_step_will_not_come_serves_an_earlier_one_after_its_own_groups() -> None:
    schedule = window(sampler="in_order", prompts_per_step=2, max_age=2)
    held = [Candidate(4, 1, 1, target_step=3), Candidate(3, 1, 1, target_step=2)]
    assert Admissions(schedule, 9).decide(held, step=2, last_step=2).trained == (3, 4)
    assert Admissions(schedule, 9).decide(held, step=2, bound={3: 2}, last_step=3).trained == ()


def test_sound_groups_of_later_targets_are_hope_enough() -> None:
    admissions = Admissions(window(sampler="in_order", max_age=2), hopeless_groups=2)
    failures = [Candidate(number, 0, 0, "no reward") for number in range(3)]
    later = Candidate(9, 0, 0, target_step=2)
    assert len(admissions.decide([later, *failures], step=1, last_step=9).dropped) == 3
