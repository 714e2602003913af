"""Requests go to the least-loaded engine that carries the newest version, and to no other."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo_core.rollout import pool as pool_module
from grpo_core.rollout.pool import InFlight, NoEngine, Pool, is_overdue
from grpo_core.trajectory import Stamp


def pool(*names: str, live: tuple[str, ...] | None = None) -> Pool:
    made = Pool()
    for name in names:
        made.join(name, f"http://{name}")
    made.live(Stamp(1, 0), names if live is None else live)
    return made


async def take(made: Pool, *, weight: int = 1, seconds: float = 0.0) -> str:
    async with made.engine(weight=weight, deadline_seconds=seconds) as member:
        return member.name


def test_load_is_spread_by_weight_and_given_back() -> None:
    made = pool("a", "b")

    async def run() -> Counter[str]:
        async with made.engine(weight=4, deadline_seconds=0) as heavy:
            light = [await _held(made) for _ in range(3)]
            assert {name for name, _ in light} == {"a", "b"} - {heavy.name}
            assert made.load() == 7
            for _, stack in light:
                await stack.__aexit__(None, None, None)
        return Counter(member.load for member in made.members())

    assert asyncio.run(run()) == {0: 2}


async def _held(made: Pool) -> tuple[str, object]:
    context = made.engine(weight=1, deadline_seconds=0)
    return (await context.__aenter__()).name, context


def test_load_is_given_back_when_the_request_fails() -> None:
    made = pool("a")

    async def run() -> None:
        async with made.engine(weight=3, deadline_seconds=0):
            raise ConnectionError

    with pytest.raises(ConnectionError):
        asyncio.run(run())
    assert made.load() == 0


def test_only_engines_with_the_newest_version_get_requests() -> None:
    made = pool("a", "b", live=("b",))
    assert {asyncio.run(take(made)) for _ in range(4)} == {"b"}
    made.live(Stamp(1, 1), ("a",))
    assert {asyncio.run(take(made)) for _ in range(4)} == {"a"}
    assert made.stamp == Stamp(1, 1)


def test_without_an_engine_requests_wait_for_one_within_their_deadline() -> None:
    made = pool("a", live=())
    with pytest.raises(NoEngine, match="0 s"):
        asyncio.run(take(made))

    async def run() -> str:
        waiting = asyncio.create_task(take(made, seconds=30))
        await asyncio.sleep(0)
        made.admit("a")
        return await waiting

    assert asyncio.run(run()) == "a"


def test_an_engine_that_left_gets_nothing() -> None:
    made = pool("a", "b")
    made.leave("a")
    made.leave("never there")
    assert {asyncio.run(take(made)) for _ in range(4)} == {"b"}
    assert [member.name for member in made.members()] == ["b"]


def test_a_snapshot_does_not_change_the_pool() -> None:
    made = pool("a")
    made.members()[0].load = 9
    assert made.load() == 0


Hold = Callable[..., str]


@pytest.fixture
def hold() -> Iterator[Hold]:
    """Begins a request that never ends; returns the engine it went to."""
    with asyncio.Runner() as runner:
        held = []

        def begin(made: Pool, **asked: object) -> str:
            context = made.engine(**{"weight": 1, "deadline_seconds": 0.0, **asked})  # type: ignore[arg-type]
            held.append(context)
            return runner.run(context.__aenter__()).name

        yield begin


def test_siblings_and_later_turns_go_where_their_prefix_is(hold: Hold) -> None:
    made = pool("a", "b", "c")
    first = hold(made, prefixes=("group 1",))
    assert {hold(made, prefixes=("group 1",)) for _ in range(10)} == {first}
    assert hold(made, prefixes=("group 2",)) != first
    own = hold(made, prefixes=("rollout 7", "group 2"))
    hold(made, prefixes=("group 2",))
    assert hold(made, prefixes=("rollout 7", "group 1")) == own


def test_a_prefix_is_not_worth_a_long_queue(hold: Hold) -> None:
    made = pool("a", "b")
    first = hold(made, prefixes=("group",))
    hold(made, weight=100, prefixes=("group",))
    assert hold(made, prefixes=("group",)) != first


def test_a_retry_goes_to_another_engine_while_there_is_one(hold: Hold) -> None:
    made = pool("a", "b")
    for _ in range(4):
        assert hold(made, avoid=("a",)) == "b"
    assert hold(made, avoid=("a", "b")) == "a"


def test_an_engine_that_lost_a_request_rests_while_there_are_others(hold: Hold) -> None:
    now = [0.0]
    made = Pool(clock=lambda: now[0])
    for name in ("a", "b"):
        made.join(name, f"http://{name}")
    made.live(Stamp(1, 0), ("a", "b"))
    made.failed("a")
    made.failed("gone")
    assert [hold(made) for _ in range(3)] == ["b", "b", "b"]
    now[0] = 6.0
    assert hold(made) == "a"
    made.failed("a")
    made.leave("b")
    assert hold(made) == "a"


def test_requests_beyond_the_limits_wait_in_their_order_and_without_a_deadline() -> None:
    made = pool("a")
    made.limit("a", 8)
    made.limit("gone", 1)

    async def run() -> None:
        order: list[str] = []

        async def request(name: str, weight: int, done: asyncio.Event) -> None:
            async with made.engine(weight=weight, deadline_seconds=0.0):
                order.append(name)
                await done.wait()

        events = [asyncio.Event() for _ in range(3)]
        tasks = [asyncio.create_task(request("first", 6, events[0]))]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(request("heavy", 6, events[1])))
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(request("light", 1, events[2])))
        await asyncio.sleep(0.2)
        assert order == ["first"]
        assert made.waiting() == 7
        events[0].set()
        while len(order) < 3:
            await asyncio.sleep(0.01)
        assert order == ["first", "heavy", "light"]
        events[1].set()
        events[2].set()
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert made.load() == made.waiting() == 0


def test_a_request_larger_than_the_limit_is_served_alone(hold: Hold) -> None:
    made = pool("a")
    made.limit("a", 4)
    assert hold(made, weight=16) == "a"


def test_a_request_that_is_cancelled_while_it_waits_leaves_nothing_behind() -> None:
    made = pool("a")
    made.limit("a", 1)

    async def run() -> str:
        async with made.engine(weight=1, deadline_seconds=0.0):
            waiting = asyncio.create_task(take(made))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        return await take(made)

    assert asyncio.run(run()) == "a"
    assert made.load() == made.waiting() == 0


def test_requests_are_listed_with_their_versions_until_they_end() -> None:
    made = pool("a")

    async def run() -> None:
        async with made.engine(weight=1, deadline_seconds=0, request_id="old", since=Stamp(1, 2)):
            made.live(Stamp(1, 5), ("a",))
            async with made.engine(weight=1, deadline_seconds=0, request_id="new"):
                assert made.in_flight() == [
                    InFlight("old", "a", "http://a", since=Stamp(1, 2), asked=Stamp(1, 0)),
                    InFlight("new", "a", "http://a", since=Stamp(1, 5), asked=Stamp(1, 5)),
                ]
        assert made.in_flight() == []

    asyncio.run(run())


@pytest.mark.parametrize(
    ("since", "asked", "masked", "adapters", "overdue"),
    [
        (4, 4, False, False, True),
        (5, 5, False, False, False),
        # A later turn of a rollout whose first one costs the group.
        (4, 6, False, False, True),
        # Its next token is of the newest version, and only those before it are masked.
        (4, 4, True, False, False),
        # All of its tokens are of the adapter that it named.
        (4, 4, True, True, True),
        (4, 5, True, True, False),
    ],
)
def test_a_request_is_overdue_when_nothing_it_still_brings_can_be_trained(
    since: int, asked: int, masked: bool, adapters: bool, overdue: bool
) -> None:
    request = InFlight("r", "a", "http://a", since=Stamp(1, since), asked=Stamp(1, asked))
    assert is_overdue(request, 5, masked=masked, adapters=adapters) is overdue


def test_who_waits_hears_at_once_that_an_engine_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on another thread's event loop; waiting until the next look would outlast the test."""
    monkeypatch.setattr(pool_module, "WAIT_SECONDS", 1e6)
    made = pool("a", live=())
    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(asyncio.run, asyncio.wait_for(take(made, seconds=1e9), 20)) for _ in range(2)]
        while made.waiting() < 2:
            time.sleep(0.001)
        made.admit("a")
        assert [request.result() for request in waiting] == ["a", "a"]
