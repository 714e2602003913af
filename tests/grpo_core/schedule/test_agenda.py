"""Each due evaluation is served once or known to be missed, however versions pass."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from grpo_core.config import EvaluationConfig, RefitConfig
from grpo_core.schedule.agenda import Agenda

EVERY_SECOND = Agenda(period=2, at_end=True)


def test_period_is_counted_in_versions() -> None:
    assert Agenda.of(EvaluationConfig(every_steps=12), RefitConfig(every_steps=4)) == Agenda(3, True)
    assert Agenda.of(EvaluationConfig(at_end=False), RefitConfig()) == Agenda(None, False)


def test_a_due_version_that_was_jumped_over_is_served_by_the_next() -> None:
    assert not EVERY_SECOND.owed(3, {2})
    assert EVERY_SECOND.owed(5, {2}) and EVERY_SECOND.overtaken(5, {2}) == []
    assert not EVERY_SECOND.owed(5, {2, 5})


def test_a_due_version_that_the_next_one_overtook_is_missed() -> None:
    assert EVERY_SECOND.overtaken(8, {3}) == [4, 6]
    assert EVERY_SECOND.overtaken(8, {3, 4, 6}) == []


def test_nothing_is_owed_while_training_goes_on_unless_it_was_asked_for() -> None:
    assert not EVERY_SECOND.owed(1, set())
    never = Agenda(None, True)
    assert not never.owed(100, set()) and never.overtaken(100, set()) == []


def test_the_last_version_is_owed_when_asked_for_or_due() -> None:
    assert EVERY_SECOND.owed_at_end(5, {4}) and not EVERY_SECOND.owed_at_end(5, {5})
    only_due = Agenda(2, False)
    assert only_due.owed_at_end(4, {2}) and not only_due.owed_at_end(5, {4})
    assert not Agenda(None, False).owed_at_end(5, set())


@given(
    period=st.integers(1, 4),
    moments=st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=30),
)
def test_each_due_version_is_served_once_or_missed(period: int, moments: list[tuple[int, bool]]) -> None:
    """Each moment some versions pass, and the evaluator is busy or not."""
    agenda, live = Agenda(period, True), 0
    served, missed = [], []
    for passed, busy in moments:
        live += passed
        missed += agenda.overtaken(live, {*served, *missed})
        if not busy and agenda.owed(live, {*served, *missed}):
            served.append(live)
    slots = [version // period for version in served + missed]
    assert len(slots) == len(set(slots))
    owed = agenda.owed(live, {*served, *missed})
    assert set(slots) | ({live // period} if owed else set()) == set(range(1, live // period + 1))
