"""As much is open as keeps the trainer busy, and no more than the window allows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from grpo_core.schedule.supply import Supply


def test_a_run_begins_with_all_that_the_window_allows() -> None:
    assert Supply.of(prompts_per_step=8, ceiling=24).limit == 24


def test_groups_that_lie_about_lower_the_limit_until_only_the_reserve_is_left() -> None:
    """A trainer that is always slower: everything that is open, except what it trains next, is ready when it begins."""
    supply = Supply.of(prompts_per_step=8, ceiling=40)
    for _ in range(60):
        supply = supply.after_step(ready=supply.limit - 8, wanted=8)
    assert supply.limit == 8 + 8 + supply.reserve


def test_a_shortage_raises_the_limit_at_once_and_by_no_less_than_the_reserve() -> None:
    low = Supply(limit=10, floor=8, ceiling=24, reserve=2)
    assert low.after_step(ready=3, wanted=8).limit == 15
    assert low.after_step(ready=7, wanted=8).limit == 12
    assert low.after_step(ready=0, wanted=8).after_step(ready=0, wanted=8).limit == 24


def test_the_limit_falls_only_after_as_many_steps_as_are_open() -> None:
    supply = Supply(limit=24, floor=8, ceiling=24, reserve=2)
    for _ in range(2):
        supply = supply.after_step(ready=16, wanted=8)
        assert supply.limit == 24
    assert supply.after_step(ready=16, wanted=8).limit == 21


def test_waves_of_arrivals_do_not_lower_the_limit() -> None:
    supply = Supply(limit=20, floor=8, ceiling=24, reserve=2)
    for ready in (16, 8, 24, 8, 16, 9):
        supply = supply.after_step(ready=ready, wanted=8)
    assert supply.limit == 20


def test_a_full_step_and_its_reserve_change_nothing() -> None:
    supply = Supply(limit=18, floor=8, ceiling=24, reserve=2)
    for ready in (8, 10, 9, 10, 8, 10):
        supply = supply.after_step(ready=ready, wanted=8)
    assert supply.limit == 18


@given(st.integers(1, 40), st.integers(1, 8), st.lists(st.integers(0, 400), max_size=30))
def test_the_limit_stays_between_one_step_and_the_window(prompts: int, steps: int, ready: list[int]) -> None:
    supply = Supply.of(prompts_per_step=prompts, ceiling=prompts * steps)
    for count in ready:
        supply = supply.after_step(ready=count, wanted=prompts)
        assert prompts <= supply.limit <= prompts * steps
