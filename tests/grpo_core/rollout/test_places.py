"""Places are given all at once and in the order of asking, however those who ask come, go or give up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_core.rollout.places import NoRoom, Places


class Guest:
    """Someone who asks for places and stays until told to go."""

    def __init__(self, places: Places, count: int, seconds: float = 20) -> None:
        self.inside = False
        self._go = asyncio.Event()
        self.task = asyncio.create_task(self._stay(places, count, seconds))

    async def _stay(self, places: Places, count: int, seconds: float) -> None:
        async with places.taken(count, deadline_seconds=seconds):
            self.inside = True
            await self._go.wait()
        self.inside = False

    async def leave(self) -> None:
        self._go.set()
        await self.task

    async def give_up(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError, NoRoom):
            await self.task


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_large_group_is_not_overtaken_by_small_ones() -> None:
    places = Places(4)
    first, large, small = (Guest(places, count) for count in (2, 4, 1))
    await settled()
    assert (first.inside, large.inside, small.inside) == (True, False, False)
    await first.leave()
    await settled()
    assert (large.inside, small.inside) == (True, False)
    await large.leave()
    await settled()
    assert small.inside
    await small.leave()


async def test_more_than_there_are_may_be_had_alone() -> None:
    places = Places(4)
    one, huge, after = (Guest(places, count) for count in (1, 9, 1))
    await settled()
    assert (one.inside, huge.inside) == (True, False)
    await one.leave()
    await settled()
    assert (huge.inside, after.inside) == (True, False)
    await huge.leave()
    await after.leave()


@pytest.mark.parametrize("leave", [Guest.give_up, lambda guest: asyncio.wait({guest.task})], ids=["cancelled", "late"])
async def test_whoever_gives_up_holds_nobody_up(leave: Callable[[Guest], Awaitable[object]]) -> None:
    places = Places(4)
    first = Guest(places, 3)
    gone = Guest(places, 4, seconds=0.05)
    small = Guest(places, 1)
    await settled()
    assert not small.inside
    await leave(gone)
    await settled()
    assert small.inside
    await first.leave()
    await small.leave()


async def test_the_deadline_names_what_was_asked_for() -> None:
    places = Places(4)
    async with places.taken(3, deadline_seconds=1):
        with pytest.raises(NoRoom, match="2 of 4 places did not become free within 0.05 s"):
            async with places.taken(2, deadline_seconds=0.05):
                pass


def test_groups_on_many_loops_never_hold_more_than_there_are() -> None:
    places, lock, held, most = Places(5), threading.Lock(), 0, 0

    async def group(count: int) -> None:
        nonlocal held, most
        async with places.taken(count, deadline_seconds=20):
            with lock:
                held += count
                most = max(most, held)
            await asyncio.sleep(0)
            with lock:
                held -= count

    async def lease() -> None:
        await asyncio.gather(*(group(count) for count in (1, 2, 3, 4, 5)))

    threads = [threading.Thread(target=lambda: asyncio.run(lease())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert held == 0 and most == 5


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["stay", "leave", "give up"])), max_size=30))
@settings(deadline=None)
def test_everybody_gets_in_or_gives_up_in_order(visits: list[tuple[int, str]]) -> None:
    async def play() -> None:
        places, guests = Places(6), []
        for count, what in visits:
            guests.append((count, Guest(places, count)))
            await settled()
            inside = [number for number, guest in guests if guest.inside]
            assert sum(inside) <= 6 or len(inside) == 1
            if what == "give up":
                await guests.pop()[1].give_up()
            elif what == "leave" and guests[0][1].inside:
                await guests.pop(0)[1].leave()
            await settled()
            entered = [guest.inside for _, guest in guests]
            assert entered == sorted(entered, reverse=True), "nobody is overtaken"
        for _, guest in guests:
            await guest.leave()

    asyncio.run(play())
