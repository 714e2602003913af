"""A slot knows which of its processes it is about."""

from dataclasses import replace
from pathlib import Path

import pytest

from flows.probe import Look
from flows.slots import LOOKS_AWAY, LOOKS_TO_RETURN, UNSTAMPED, Slot, engine_spec, is_back, restart_delay
from grpo_core.config import LocalPool
from grpo_core.recipe import parse


def slot(**changes: object) -> Slot:
    return replace(Slot(3, "http://a:1", "engine-3", local=True), **changes)


def test_delays_double_up_to_a_minute() -> None:
    assert [restart_delay(losses) for losses in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_losses_count_until_an_hour_of_service() -> None:
    served = slot(losses=2, ready=True, ready_at=100.0)
    assert served.losses_by(3699.0) == 2
    assert served.losses_by(3700.0) == 0
    assert slot(losses=2).losses_by(1e9) == 2


def test_the_next_process_has_a_new_name_and_nothing_of_the_old_one() -> None:
    old = slot(ready=True, stamp="1.4", broken="canary", missed=2, answered=1, overdue=True, losses=1, heard_at=5.0)
    old.renew("http://a:2", losses=2, restart_at=9.0)
    assert old == Slot(3, "http://a:2", "engine-3-1", local=True, lives=1, losses=2, restart_at=9.0)
    old.renew("http://a:3")
    assert old.name == "engine-3-2"


@pytest.mark.parametrize(
    ("had", "says", "lost"),
    [
        (None, "default", False),
        ("default", "default", False),
        ("1.4", "default", True),
        ("1.4", "1.3", False),
        ("1.4", None, False),
    ],
)
def test_an_engine_was_restarted_when_it_forgot_that_it_had_weights(
    had: str | None, says: str | None, lost: bool
) -> None:
    assert slot(stamp=had).was_restarted(says) is lost


@pytest.mark.parametrize(
    ("broken", "had", "missed", "restarted"),
    [
        ("start: 500", UNSTAMPED, LOOKS_AWAY, True),
        ("start: 500", None, LOOKS_AWAY, True),
        ("start: 500", UNSTAMPED, LOOKS_AWAY - 1, False),
        (None, UNSTAMPED, LOOKS_AWAY, False),
        # It would say that it has no version any more.
        ("start: 500", "1.4", LOOKS_AWAY, False),
    ],
)
def test_a_broken_engine_without_a_version_was_restarted_when_it_was_away_for_a_while(
    broken: str | None, had: str | None, missed: int, restarted: bool
) -> None:
    says = had or UNSTAMPED
    assert slot(local=False, ready=True, broken=broken, stamp=had, missed=missed).was_restarted(says) is restarted


@pytest.mark.parametrize(
    ("losses", "answered", "seconds", "back"),
    [
        (0, 1, 0.0, True),
        (1, LOOKS_TO_RETURN, 1.0, True),
        (1, LOOKS_TO_RETURN - 1, 100.0, False),
        (1, LOOKS_TO_RETURN, 0.9, False),
        (4, LOOKS_TO_RETURN, 7.9, False),
        (4, LOOKS_TO_RETURN, 8.0, True),
        (50, 1000, 59.0, False),
        (50, 1000, 60.0, True),
    ],
)
def test_an_engine_that_comes_and_goes_does_so_ever_more_rarely(
    losses: int, answered: int, seconds: float, back: bool
) -> None:
    assert is_back(losses, answered=answered, seconds=seconds) is back


def test_only_looks_in_a_row_count() -> None:
    lost = slot(local=False, losses=1, started_at=100.0)
    for now in (101.0, 102.0):
        lost.hear(Look(True), now)
    lost.miss()
    assert (lost.answered, lost.missed, lost.ready) == (0, 1, False)
    for now in (103.0, 104.0, 105.0):
        assert not lost.ready
        lost.hear(Look(True), now)
    assert (lost.ready, lost.ready_at, lost.missed) == (True, 105.0, 0)


@pytest.mark.parametrize(
    ("changes", "may"),
    [
        ({}, True),
        ({"ready": True, "overdue": True}, True),
        ({"overdue": True}, False),
        ({"ready": True, "broken": "canary"}, False),
        ({"ready": True, "unwanted": True}, False),
        ({"local": True, "broken": "canary"}, True),
    ],
)
def test_an_engine_is_waited_for_while_there_is_reason_to(changes: dict[str, object], may: bool) -> None:
    assert slot(**{"local": False, **changes}).may_serve is may


def test_an_engine_serves_while_it_answers_and_is_whole_and_wanted() -> None:
    fresh = slot()
    assert not fresh.serves
    fresh.hear(Look(True, "1.0"), now=7.0)
    assert (fresh.serves, fresh.ready_at, fresh.heard_at, fresh.stamp) == (True, 7.0, 7.0, "1.0")
    fresh.hear(Look(True), now=9.0)
    assert (fresh.ready_at, fresh.heard_at, fresh.stamp) == (7.0, 9.0, "1.0")
    assert not replace(fresh, broken="canary").serves
    assert not replace(fresh, unwanted=True).serves


@pytest.mark.parametrize(("adapter_only", "rank"), [(True, 12), (False, None)])
def test_engines_are_started_for_adapters_when_these_are_what_they_get(adapter_only: bool, rank: int | None) -> None:
    values = {"model": {"lora": {"rank": 12}}, "refit": {"adapter_only": adapter_only}}
    assert engine_spec(parse(values, where="test"), LocalPool(), Path("/policy"), 0, 8000).lora_rank == rank
