"""A slot knows which of its processes it is about."""

from dataclasses import replace
from pathlib import Path

import pytest

from flows.probe import Look
from flows.slots import Slot, engine_spec, restart_delay
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
    old = slot(ready=True, stamp="1.4", broken="canary", seen_away=True, overdue=True, losses=1, heard_at=5.0)
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
def test_weights_are_lost_when_an_engine_forgot_that_it_had_some(had: str | None, says: str | None, lost: bool) -> None:
    assert slot(stamp=had).has_lost_weights(says) is lost


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
