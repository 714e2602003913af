"""Each due version is served once, by itself or by the next version that could be evaluated, however versions pass."""

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
    assert not EVERY_SECOND.due(3, {0, 2})
    assert list(EVERY_SECOND.due(5, {2})) == [4]
    assert not EVERY_SECOND.due(5, {5, 2})


def test_due_versions_that_passed_meanwhile_are_served_together() -> None:
    assert list(EVERY_SECOND.due(9, {3})) == [4, 6, 8]
    assert list(EVERY_SECOND.due(9, {3, 6})) == [8]


def test_nothing_is_due_while_training_goes_on_unless_it_was_asked_for() -> None:
    assert not EVERY_SECOND.due(1, set())
    assert not Agenda(None, True).due(100, set())


def test_the_last_version_is_owed_when_asked_for_or_due() -> None:
    assert EVERY_SECOND.owed_at_end(5, {4}) and not EVERY_SECOND.owed_at_end(5, {5})
    only_due = Agenda(2, False)
    assert only_due.owed_at_end(4, {2}) and only_due.owed_at_end(5, {2}) and not only_due.owed_at_end(5, {4})
    assert not Agenda(None, False).owed_at_end(5, set())


@given(
    period=st.integers(1, 4),
    moments=st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=30),
)
def test_each_due_version_is_served_once_and_by_none_before_it(period: int, moments: list[tuple[int, bool]]) -> None:
    """Each moment some versions pass, and the evaluator is busy or not."""
    agenda, live = Agenda(period, True), 0
    served: dict[int, list[int]] = {}
    for passed, busy in moments:
        live += passed
        if not busy and (due := agenda.due(live, served)):
            served[live] = list(due)
    served[live] = served.get(live, []) + list(agenda.due(live, served))
    assert [each for due in served.values() for each in due] == list(range(period, live + 1, period))
    assert all(each <= version for version, due in served.items() for each in due)
