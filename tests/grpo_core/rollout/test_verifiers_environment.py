"""Environments in the shapes that the library verifiers has given them over its versions."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_core.rollout.environments import Opening, Step
from grpo_core.rollout.episodes import EnvironmentFailed, Episode
from grpo_core.rollout.verifiers_environment import Shared, Verifiers, VerifiersError, load

PROMPT = [{"role": "user", "content": "2 + 2?"}]
COLUMNS = {"prompt": PROMPT, "answer": "4", "info": '{"level": 3}'}


def says(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def correct(completion: list[dict[str, Any]], answer: str, **columns: Any) -> float:
    return float(completion[-1]["content"] == answer)


async def polite(completion: list[Any], parser: Any) -> float:
    return float(parser in completion[-1].content)


class Older:
    """Messages and state go in and come out."""

    rubric = SimpleNamespace(reward_funcs=[correct], reward_weights=[2.0])

    async def setup_state(self, state: dict[str, Any], **columns: Any) -> dict[str, Any]:
        return {**state, "level": state["info"]["level"]}

    async def is_completed(self, messages: list[Any], state: dict[str, Any], **columns: Any) -> bool:
        return state["turn"] >= state["level"]

    async def env_response(self, messages: list[Any], state: dict[str, Any], **columns: Any) -> Any:
        assert messages[-1]["role"] == "assistant"
        return [{"role": "user", "content": f"try {state['turn']}"}], {**state, "seen": len(messages)}


class Newer:
    """The state is changed in place, and messages have attributes."""

    rubric = SimpleNamespace(
        rubrics=[
            SimpleNamespace(funcs=[correct], weights=[1.0], class_objects={}),
            SimpleNamespace(funcs=[polite], weights=[0.5]),
        ],
        class_objects={"parser": "4"},
    )
    oai_tools = ({"type": "function", "function": {"name": "add"}},)

    async def setup_state(self, state: dict[str, Any]) -> None:
        state["calls"] = 0

    def is_completed(self, state: dict[str, Any]) -> bool:
        return state["trajectory"][-1]["completion"][-1].tool_calls is None

    async def env_response(self, messages: list[Any], state: dict[str, Any]) -> list[Any]:
        call = messages[-1].tool_calls[0]
        assert call.function.arguments == call.arguments == '{"a": 2}'
        state["calls"] += 1
        message = {"role": "tool", "content": "4", "tool_call_id": call.id}
        return [SimpleNamespace(model_dump=lambda exclude_none: message)]


async def test_an_older_environment_answers_until_it_is_completed() -> None:
    environment = Verifiers(Shared(Older()))
    assert await environment.reset(COLUMNS, 0) == Opening()
    assert await environment.step(says("3")) == Step(({"role": "user", "content": "try 1"},))
    assert await environment.step(says("5")) == Step(({"role": "user", "content": "try 2"},))
    assert await environment.step(says("4")) == Step(done=True)
    assert await environment.reward() == 2.0


async def test_a_newer_environment_runs_its_own_tools() -> None:
    environment = Verifiers(Shared(Newer()))
    opening = await environment.reset(COLUMNS, 0)
    assert [schema["function"]["name"] for schema in opening.tools] == ["add"]
    call = {"id": "t0001c000", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    step = await environment.step(says("", tool_calls=[call]))
    assert step == Step(({"role": "tool", "content": "4", "tool_call_id": "t0001c000"},))
    assert (await environment.step(says("4"))).done
    assert await environment.reward() == 1.5


async def test_a_single_turn_environment_is_done_after_one_answer() -> None:
    environment = Verifiers(Shared(SimpleNamespace(rubric=SimpleNamespace(funcs=[correct], weights=[1.0]))))
    await environment.reset(COLUMNS, 0)
    assert (await environment.step(says("5"))).done
    assert await environment.reward() == 0.0


async def test_a_reward_function_that_raises_is_no_zero() -> None:
    def broken(completion: list[Any]) -> float:
        raise KeyError("lost")

    environment = Verifiers(Shared(SimpleNamespace(rubric=SimpleNamespace(funcs=[broken], weights=[1.0]))))
    await environment.reset(COLUMNS, 0)
    await environment.step(says("4"))
    with pytest.raises(KeyError):
        await environment.reward()


async def test_episodes_of_one_environment_do_not_share_state() -> None:
    shared = Shared(Older())
    one, other = Verifiers(shared), Verifiers(shared)
    await one.reset(COLUMNS, 0)
    await one.step(says("4"))
    await other.reset(COLUMNS, 0)
    assert await other.step(says("5")) == Step(({"role": "user", "content": "try 1"},))
    assert PROMPT == [{"role": "user", "content": "2 + 2?"}]


def test_a_reward_over_a_whole_group_is_refused_by_name() -> None:
    def spread(completions: list[Any]) -> list[float]:
        return []

    with pytest.raises(VerifiersError, match="spread .* completions of a whole group"):
        Shared(SimpleNamespace(rubric=SimpleNamespace(funcs=[spread], weights=[1.0])))


class Holding:
    """Holds something for each rollout until it is cleaned up after, as the library's newer versions do it: when a stop
    condition is met."""

    rubric = SimpleNamespace(funcs=[correct, lambda state: 10.0 * state["cleaned_up"]], weights=[1.0, 1.0])

    def __init__(self, most: int = 2) -> None:
        self.most = most
        self.held = 0

    async def setup_state(self, state: dict[str, Any]) -> None:
        self.held += 1
        state["cleaned_up"] = 0

    async def is_completed(self, state: dict[str, Any], **columns: Any) -> bool:
        if state["turn"] < self.most:
            return False
        state["timing"]["total_ms"] = 1000 * (time.time() - state["timing"]["start_time"])
        await self._cleanup(state)
        return True

    async def _cleanup(self, state: dict[str, Any]) -> None:
        self.held -= 1
        state["cleaned_up"] += 1

    async def env_response(self, messages: list[Any], state: dict[str, Any]) -> str:
        return "again"


async def test_a_rollout_is_cleaned_up_after_once_whoever_ends_it_and_before_it_is_rewarded() -> None:
    holding = Holding()
    one = Verifiers(Shared(holding))
    await one.reset(COLUMNS, 0)
    assert [(await one.step(says("4"))).done for _ in range(2)] == [False, True]
    assert await one.reward() == 11.0 and holding.held == 0
    await one.reset(COLUMNS, 0)
    await one.step(says("4"))  # and cut off there
    assert holding.held == 1 and await one.reward() == 10.0 and holding.held == 0
    await one.reset(COLUMNS, 0)
    await one.reset(COLUMNS, 0)
    assert holding.held == 1
    await one.close()
    await one.close()
    assert holding.held == 0


async def test_a_rollout_that_is_cancelled_or_fails_in_its_setup_is_cleaned_up_after() -> None:
    class Failing(Holding):
        async def setup_state(self, state: dict[str, Any]) -> None:
            await super().setup_state(state)
            raise OSError("no machine")

    holding = Failing()
    one = Verifiers(Shared(holding))
    with pytest.raises(OSError, match="no machine"):
        await one.reset(COLUMNS, 0)
    await one.close()
    assert holding.held == 0


async def test_a_plain_function_that_hangs_is_late_alone() -> None:
    gate = threading.Event()

    class Hanging(Older):
        async def is_completed(self, **columns: Any) -> bool:
            return False

        def env_response(self, messages: list[Any], state: dict[str, Any]) -> str:
            if messages[-1]["content"] == "hang":
                gate.wait(20)
            return "go on"

    shared = Shared(Hanging())
    late, other = Episode(Verifiers(shared), 0.5), Episode(Verifiers(shared), 20)
    await late.reset(COLUMNS, 0)
    await other.reset(COLUMNS, 0)
    hanging = asyncio.create_task(late.step(says("hang")))
    assert (await other.step(says("x"))).messages[0]["content"] == "go on"
    assert not hanging.done()
    with pytest.raises(EnvironmentFailed, match=r"within 0.5 s"):
        await hanging
    assert shared.calls.left_behind == 1
    gate.set()


def test_leases_on_loops_of_their_own_share_an_environment_whose_lock_belongs_to_one() -> None:
    class Locking(Older):
        lock = asyncio.Lock()

        async def setup_state(self, state: dict[str, Any], **columns: Any) -> dict[str, Any]:
            async with self.lock:
                await asyncio.sleep(0.01)
            return {**state, "level": 1}

    shared, done = Shared(Locking()), []

    async def rollouts() -> None:
        await asyncio.gather(*(Verifiers(shared).reset(COLUMNS, 0) for _ in range(4)))
        done.append(True)

    threads = [threading.Thread(target=lambda: asyncio.run(rollouts())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert done == [True] * 3


def test_a_function_of_weight_0_only_measures() -> None:
    assert [
        weight
        for _, weight in Shared(
            SimpleNamespace(rubric=SimpleNamespace(funcs=[correct, polite], weights=[0.0, 2]))
        ).functions
    ] == [2.0]


def test_loading_leaves_the_signals_to_whoever_had_them() -> None:
    def greedy(**arguments: Any) -> Older:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        return Older()

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    load(greedy, {})
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_an_environment_that_cannot_be_loaded_is_an_error_that_says_so() -> None:
    with pytest.raises(VerifiersError, match=r"cannot load its environment with {'level': 3}: TypeError"):
        load(Older, {"level": 3})
