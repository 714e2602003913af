"""Requests go to the least-loaded engine that carries the newest version, and to no other."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from grpo_core.rollout.pool import NoEngine, Pool
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
