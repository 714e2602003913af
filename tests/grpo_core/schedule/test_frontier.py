"""The frontier skips nothing, repeats nothing, and forgets what is settled."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from grpo_core.schedule.frontier import Frontier, FrontierError, FrontierState, OrdinalState

CASES = json.loads((Path(__file__).parents[2] / "cases" / "frontier.json").read_text())["cases"]


def apply(operations: list[list[Any]]) -> Frontier:
    frontier = Frontier()
    for name, *arguments in operations:
        getattr(frontier, name)(*arguments)
    return frontier


def interleaved() -> Frontier:
    """Ordinals 3-7 lost, their places refilled by 16-20, 11 and 12 buffered, the rest in flight."""
    return apply(CASES[2]["ops"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_documented_case(case: dict[str, Any]) -> None:
    frontier = apply(case["ops"])
    state = frontier.checkpoint()
    assert (state.cut, frontier.frontier) == (case["cut"], case["frontier"])
    assert state.trained_above_cut == case["trained_above_cut"]
    for keep, key in ((True, "resume_keep_leases_next"), (False, "resume_discard_leases_next")):
        resumed = Frontier.resume(state, keep_buffered=keep)
        assert resumed.lease(len(case[key])) == case[key]


def test_stale_group_comes_back_and_admissible_ones_are_kept() -> None:
    frontier = Frontier()
    frontier.lease(32)
    frontier.buffered([*range(24), 24, 25, 28])
    frontier.trained(range(24), 5)
    resumed = Frontier.resume(frontier.checkpoint(), retained=[25, 28])
    assert resumed.lease(8) == [24, 26, 27, 29, 30, 31, 32, 33]
    assert resumed.members(OrdinalState.BUFFERED) == [25, 28]


def test_second_resume_still_knows_what_was_trained_above_the_first_cut() -> None:
    resumed = Frontier.resume(interleaved().checkpoint(), keep_buffered=False)
    resumed.lease(16)
    resumed.buffered(range(8, 16))
    resumed.trained([8, 9, 10, 11, 12, 13, 14], 2)
    state = resumed.checkpoint()
    assert (state.cut, state.trained_above_cut) == (15, [16, 17, 18, 19, 20])
    again = Frontier.resume(state)
    again.trained([15], 3)
    assert again.frontier == 21
    assert again.lease(2) == [21, 22]


def test_ordinal_dropped_above_the_cut_is_not_generated_again() -> None:
    frontier = Frontier()
    frontier.lease(9)
    frontier.buffered([0, 1, 2, 3, 4, 5, 7, 8])
    frontier.dropped([6], "generation_failed")
    frontier.trained([0, 1, 2, 3], 1)
    state = frontier.checkpoint()
    assert (state.cut, state.dropped_above_cut) == (4, [6])
    assert Frontier.resume(state, keep_buffered=False).lease(5) == [4, 5, 7, 8, 9]


def test_returned_ordinals_are_leased_before_new_ones_in_ascending_order() -> None:
    frontier = Frontier()
    frontier.lease(6)
    frontier.returned([5])
    frontier.returned([1, 3])
    assert frontier.lease(2) == [1, 3]
    assert frontier.lease(2) == [5, 6]


def test_observed_lease_may_leave_a_gap_that_is_leased_later() -> None:
    frontier = Frontier()
    frontier.leased([2, 5])
    assert frontier.state(3) is OrdinalState.NEW
    assert frontier.counts().leased == 2
    frontier.returned([5])
    assert frontier.lease(6) == [5, 0, 1, 3, 4, 6]


def test_gap_of_an_observed_lease_is_leased_after_a_resume() -> None:
    frontier = Frontier()
    frontier.leased([1, 2])
    frontier.buffered([1, 2])
    assert Frontier.resume(frontier.checkpoint()).lease(2) == [0, 3]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda f: f.trained([16], 2), "16 is trained and cannot become trained"),
        (lambda f: f.trained([8], 2), "8 is in_flight and cannot become trained"),
        (lambda f: f.trained([0], 2), "0 is settled and cannot become trained"),
        (lambda f: f.buffered([21]), "21 is new and cannot become buffered"),
        (lambda f: f.buffered([11]), "11 is buffered and cannot become buffered"),
        (lambda f: f.buffered([8, 8]), "8 is named twice"),
        (lambda f: f.returned([3]), "3 is settled and cannot become returned"),
        (lambda f: f.dropped([21], "stale"), "21 is new and cannot become dropped"),
        (lambda f: f.dropped([8], ""), "needs a reason"),
        (lambda f: f.leased([8]), "8 is in_flight and cannot become in_flight"),
        (lambda f: f.leased([-1]), "-1 does not exist"),
        (lambda f: f.lease(-1), "cannot lease -1"),
        (lambda f: f.trained([11], 0), "step 0 cannot train after step 1"),
        (lambda f: f.set_target_step(16, 4), "16 is trained"),
        (lambda f: f.set_failure_count(40, 1), "40 is new"),
    ],
)
def test_illegal_move_is_refused_by_name(call: Any, named: str) -> None:
    with pytest.raises(FrontierError, match=named):
        call(interleaved())


def test_refused_call_changes_nothing() -> None:
    frontier = interleaved()
    before = frontier.checkpoint()
    for call in (
        lambda: frontier.trained([11, 8], 2),
        lambda: frontier.dropped([8, 21], "stale"),
        lambda: frontier.leased([30, 8]),
    ):
        with pytest.raises(FrontierError):
            call()
    assert frontier.checkpoint() == before


def test_checkpoint_survives_json() -> None:
    frontier = interleaved()
    frontier.set_failure_count(8, 2)
    frontier.set_target_step(11, 7)
    state = frontier.checkpoint()
    assert FrontierState.from_json(json.loads(json.dumps(state.to_json()))) == state
    resumed = Frontier.resume(state)
    assert (dict(resumed.failure_counts), dict(resumed.target_steps)) == ({8: 2}, {11: 7})


def test_failures_and_targets_end_with_their_ordinal() -> None:
    frontier = interleaved()
    frontier.set_failure_count(8, 2)
    frontier.set_target_step(12, 7)
    frontier.dropped([8], "generation_failed")
    frontier.trained([12], 7)
    assert not frontier.failure_counts and not frontier.target_steps


def test_damaged_state_is_refused() -> None:
    state = interleaved().checkpoint()
    with pytest.raises(FrontierError, match="ordinal 16 in buffered"):
        replace(state, buffered=[16])
    with pytest.raises(FrontierError, match="ordinal 7 in trained_above_cut"):
        replace(state, trained_above_cut=[7])
    with pytest.raises(FrontierError, match="cut 30"):
        replace(state, cut=30)
    document = state.to_json()
    del document["cut"]
    with pytest.raises(FrontierError, match="has the keys"):
        FrontierState.from_json(document)


def test_retaining_what_is_not_buffered_is_refused() -> None:
    with pytest.raises(FrontierError, match="ordinal 13 cannot be retained"):
        Frontier.resume(interleaved().checkpoint(), retained=[11, 13])


def test_settled_ordinals_leave_nothing_behind() -> None:
    frontier = Frontier()
    for step in range(1, 200):
        leased = frontier.lease(8)
        frontier.buffered(leased)
        frontier.dropped(leased[:2], "zero_variance")
        frontier.trained(leased[2:], step)
    state = frontier.checkpoint()
    assert len(json.dumps(state.to_json())) < 400
    counts = frontier.counts()
    assert (counts.trained, counts.dropped, counts.leased) == (199 * 6, {"zero_variance": 398}, 199 * 8)


class Life(RuleBasedStateMachine):
    """Random lives, kills included, against a plain dict of states that forgets nothing."""

    @initialize()
    def start(self) -> None:
        self.frontier = Frontier()
        self.model: dict[int, str] = {}
        self.trained: list[int] = []
        self.step = 0
        self.cut = 0
        self.saved: tuple[FrontierState, dict[int, str], list[int]] | None = None

    def some(self, data: st.DataObject, *states: str) -> list[int]:
        candidates = sorted(ordinal for ordinal, state in self.model.items() if state in states)
        return data.draw(st.lists(st.sampled_from(candidates), unique=True)) if candidates else []

    def place(self, ordinals: list[int], state: str) -> None:
        self.model.update(dict.fromkeys(ordinals, state))

    @rule(count=st.integers(0, 6))
    def lease(self, count: int) -> None:
        returned = sorted(ordinal for ordinal, state in self.model.items() if state == "returned")[:count]
        leased = self.frontier.lease(count)
        assert leased[: len(returned)] == returned
        assert leased[len(returned) :] == sorted(set(leased) - self.model.keys())
        self.place(leased, "in_flight")

    @rule(gap=st.integers(0, 3), count=st.integers(1, 3), data=st.data())
    def observe(self, gap: int, count: int, data: st.DataObject) -> None:
        start = max(self.model, default=-1) + 1 + gap
        ordinals = [*self.some(data, "returned"), *range(start, start + count)]
        self.frontier.leased(ordinals)
        self.place(ordinals, "in_flight")

    @rule(data=st.data())
    def buffer(self, data: st.DataObject) -> None:
        ordinals = self.some(data, "in_flight")
        self.frontier.buffered(ordinals)
        self.place(ordinals, "buffered")

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        ordinals = self.some(data, "in_flight", "buffered")
        self.frontier.returned(ordinals)
        self.place(ordinals, "returned")

    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        ordinals = self.some(data, "buffered")
        self.step += 1
        self.frontier.trained(ordinals, self.step)
        self.place(ordinals, "trained")
        self.trained += ordinals

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        ordinals = self.some(data, "in_flight", "buffered", "returned")
        self.frontier.dropped(ordinals, "failed")
        self.place(ordinals, "dropped")

    @rule()
    def save(self) -> None:
        state = FrontierState.from_json(json.loads(json.dumps(self.frontier.checkpoint().to_json())))
        assert state.cut >= self.cut
        self.cut = state.cut
        self.saved = state, dict(self.model), list(self.trained)

    @rule(keep=st.booleans(), data=st.data())
    def crash(self, keep: bool, data: st.DataObject) -> None:
        if self.saved is None:
            return
        state, model, trained = self.saved
        self.model, self.trained, self.step = dict(model), list(trained), state.step
        retained = self.some(data, "buffered")
        self.frontier = Frontier.resume(state, keep_buffered=keep, retained=retained)
        for ordinal in range(state.next_ordinal):
            if self.model.get(ordinal) not in ("trained", "dropped"):
                self.model[ordinal] = "buffered" if keep and ordinal in retained else "returned"

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "model"):
            return
        frontier = self.frontier.frontier
        assert all(self.model[ordinal] in ("trained", "dropped") for ordinal in range(frontier))
        assert self.model.get(frontier) not in ("trained", "dropped")
        for ordinal in range(frontier, max(self.model, default=0) + 2):
            assert self.frontier.state(ordinal) == self.model.get(ordinal, "new")
        assert len(self.trained) == len(set(self.trained))
        counts = self.frontier.counts()
        assert counts.leased == len(self.model)
        assert (counts.trained, counts.dropped.get("failed", 0)) == tuple(
            sum(state == name for state in self.model.values()) for name in ("trained", "dropped")
        )


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
