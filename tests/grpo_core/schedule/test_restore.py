"""What other asynchronous trainers document as hard cases of a restart, translated.

Where the design makes one impossible, the test shows why: prompts are a function of their ordinal and not of a cursor,
so there is no ring of cursor states that could overflow, no row that could lack its stamp, and no lineage that could
lose its alignment. F1 to F4 are `tests/cases/frontier.json`;
a crash between any two writes (F13) is a whole-system scenario.
"""

from __future__ import annotations

import json

import pytest

from grpo_core.prompts import PromptStream, Row
from grpo_core.schedule.admission import Admissions, Candidate
from grpo_core.schedule.frontier import Frontier, FrontierError, FrontierState, OrdinalState
from tests.grpo_core.schedule.test_window import window


def saved(frontier: Frontier) -> FrontierState:
    """What a checkpoint gives back."""
    return FrontierState.from_json(json.loads(json.dumps(frontier.checkpoint().to_json())))


def stream(size: int = 16) -> PromptStream:
    return PromptStream([Row([{"role": "user", "content": str(number)}], {}) for number in range(size)], seed=5)


# F5


def test_groups_that_went_stale_while_the_run_was_down_are_generated_again_and_the_others_kept() -> None:
    """Resuming at step 6 with a window of 1: of 24 (version 4), 25 and 28 (version 5) the first is too old."""
    frontier = Frontier()
    frontier.lease(32)
    frontier.buffered([*range(24), 24, 25, 28])
    frontier.trained(range(24), 5)
    resumed = Frontier.resume(saved(frontier))
    schedule = window(max_age=1, prompts_per_step=3)
    held = [Candidate(24, 4, 4), Candidate(25, 5, 5), Candidate(28, 5, 5)]
    admission = Admissions(schedule, 100).decide(held, step=7, last_step=100)
    assert admission.returned == {24: "stale"}
    resumed.returned(admission.returned)
    assert resumed.lease(8) == [24, 26, 27, 29, 30, 31, 32, 33]


# F6


def test_no_prompt_is_out_of_reach_however_far_the_run_has_gone() -> None:
    """There is no ring of cursor states: an ordinal's prompt is computed, a million ordinals later as well."""
    prompts = stream()
    early = [prompts.prompt(ordinal) for ordinal in range(40)]
    assert prompts.prompt(1_000_000).epoch == 62_500
    assert [stream().prompt(ordinal) for ordinal in range(40)] == early


# F7


def test_a_second_resume_regenerates_only_what_the_second_checkpoint_lacks() -> None:
    frontier = Frontier()
    frontier.lease(21)
    frontier.buffered([0, 1, 2, *range(16, 21)])
    frontier.dropped([3, 4, 5, 6, 7], "generation_failed")
    frontier.trained([0, 1, 2, *range(16, 21)], 1)
    second = Frontier.resume(saved(frontier), keep_buffered=False)
    second.leased(range(8, 16))
    second.buffered(range(8, 16))
    second.trained(range(8, 16), 2)
    second.lease(8)
    state = saved(second)
    assert (state.cut, state.trained_above_cut) == (21, [])
    assert Frontier.resume(state).lease(9) == list(range(21, 30))


# F8


def test_a_failed_group_is_lost_once_and_for_all_wherever_the_cut_is() -> None:
    """Decided: a drop is terminal. It is not generated again even when a later cut lies below it."""
    frontier = Frontier()
    frontier.lease(9)
    frontier.buffered([0, 1, 2, 3, 4, 5, 7, 8])
    frontier.dropped([6], "generation_failed")
    frontier.trained([0, 1, 2, 3], 1)
    assert saved(frontier).cut == 4
    assert 6 not in Frontier.resume(saved(frontier), keep_buffered=False).lease(8)


# F9


def test_a_group_that_was_trained_does_not_hold_back_the_cut_while_its_lease_is_still_open() -> None:
    frontier = Frontier()
    frontier.lease(4)
    frontier.buffered([0, 1])
    frontier.trained([0, 1], 1)
    assert frontier.members(OrdinalState.IN_FLIGHT) == [2, 3]
    assert saved(frontier).cut == 2


# F10 and F11


def test_rows_need_no_stamp_of_their_own() -> None:
    """The ordinal is the position in the stream, whatever columns a row has, and comes back the same after a resume."""
    prompts = PromptStream([Row([], {}), Row([], {"anything": None})], seed=0, shuffle=False)
    assert [prompts.prompt(ordinal).ordinal for ordinal in range(4)] == [0, 1, 2, 3]
    assert prompts.prompt(3) == PromptStream(prompts.rows, seed=0, shuffle=False).prompt(3)


# F12


@pytest.mark.parametrize("missing", ["cut", "trained_above_cut", "failure_counts", "target_steps"])
def test_a_checkpoint_without_a_frontier_is_refused_and_not_guessed_at(missing: str) -> None:
    document = Frontier().checkpoint().to_json()
    del document[missing]
    with pytest.raises(FrontierError, match="resume from a checkpoint of this version"):
        FrontierState.from_json(document)


# What goes wrong in others and was not among their tests


@pytest.mark.parametrize("keep", [True, False])
def test_a_checkpoint_right_after_a_resume_leads_to_the_same_place(keep: bool) -> None:
    """Nothing has to be pulled first: the state of a resumed run is whole from its first moment."""
    frontier = Frontier()
    frontier.lease(12)
    frontier.buffered([0, 1, 2, 3, 4, 6, 7, 10])
    frontier.trained([0, 1, 2, 3, 4], 1)
    once = Frontier.resume(saved(frontier), keep_buffered=keep)
    twice = Frontier.resume(saved(once), keep_buffered=keep)
    assert saved(twice) == saved(once)
    assert twice.lease(9) == once.lease(9)


def test_what_is_put_out_of_the_buffer_is_leased_again_and_not_forgotten() -> None:
    frontier = Frontier()
    frontier.lease(4)
    frontier.buffered(range(4))
    admission = Admissions(window(max_age=1), 100).decide(
        [Candidate(0, 0, 0), Candidate(1, 4, 4), Candidate(2, 4, 4), Candidate(3, 4, 4)], step=5, last_step=100
    )
    frontier.returned(admission.returned)
    frontier.trained(admission.trained, 5)
    assert saved(frontier).cut == 0
    assert Frontier.resume(saved(frontier)).lease(2) == [0, 4]


# Replay buffers with exact targets, with two groups to a step unless said otherwise


def needs(bound: dict[int, int], *, resume: int, age: int) -> dict[int, int]:
    """How many groups each target lacks when step `resume` comes next, all versions before it being live."""
    schedule = window(sampler="in_order", max_age=age)
    done = resume - 1
    return dict(schedule.shortfalls(live_version=done, done=done, settled=2 * done, bound=bound))


def test_targets_of_a_restored_buffer_are_filled_up_and_complete_ones_left_alone() -> None:
    assert needs({2: 2, 3: 1}, resume=2, age=1) == {3: 1}


def test_an_empty_buffer_needs_every_target_of_the_window() -> None:
    assert needs({}, resume=5, age=1) == {5: 2, 6: 2}


def test_of_a_restored_target_only_what_is_fresh_enough_counts() -> None:
    """Versions 0, 1 and 4 for target 6, window 1: only the last may still be trained."""
    held = [Candidate(0, 0, 0, target_step=6), Candidate(1, 1, 1, target_step=6), Candidate(2, 4, 4, target_step=6)]
    schedule = window(sampler="in_order", max_age=1)
    admission = Admissions(schedule, 100).decide(held, step=6, bound={7: 2}, last_step=100)
    assert set(admission.returned) == {0, 1} and admission.trained == ()
    assert needs({6: 1}, resume=6, age=1)[6] == 1


def test_a_complete_target_beside_a_missing_one_does_not_end_in_a_deadlock() -> None:
    """Target 30 is complete, 31 was lost. 31 is leased at once, and its claim is all that step 30 waits for."""
    assert needs({30: 2}, resume=30, age=1) == {31: 2}
    schedule = window(sampler="in_order", max_age=1)
    held = [Candidate(58, 28, 28, target_step=30), Candidate(59, 28, 28, target_step=30)]
    admissions = Admissions(schedule, 100)
    assert admissions.decide(held, step=30, bound={30: 2}, last_step=100).trained == ()
    assert admissions.decide(held, step=30, bound={30: 2, 31: 2}, last_step=100).trained == (58, 59)


def test_a_step_never_borrows_from_another_target() -> None:
    held = [Candidate(number, 4, 4, target_step=6) for number in range(4)]
    admission = Admissions(window(sampler="in_order", max_age=1), 100).decide(held, step=5, last_step=100)
    assert (admission.trained, admission.returned, admission.admissible) == ((), {}, 0)
