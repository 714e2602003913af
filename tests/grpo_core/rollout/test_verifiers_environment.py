"""Environments in the shapes that the library verifiers has given them over its versions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from grpo_core.rollout.environments import Opening, Step
from grpo_core.rollout.verifiers_environment import Verifiers, VerifiersError

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
    environment = Verifiers(Older())
    assert await environment.reset(COLUMNS, 0) == Opening()
    assert await environment.step(says("3")) == Step(({"role": "user", "content": "try 1"},))
    assert await environment.step(says("5")) == Step(({"role": "user", "content": "try 2"},))
    assert await environment.step(says("4")) == Step(done=True)
    assert await environment.reward() == 2.0


async def test_a_newer_environment_runs_its_own_tools() -> None:
    environment = Verifiers(Newer())
    opening = await environment.reset(COLUMNS, 0)
    assert [schema["function"]["name"] for schema in opening.tools] == ["add"]
    call = {"id": "t0001c000", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    step = await environment.step(says("", tool_calls=[call]))
    assert step == Step(({"role": "tool", "content": "4", "tool_call_id": "t0001c000"},))
    assert (await environment.step(says("4"))).done
    assert await environment.reward() == 1.5


async def test_a_single_turn_environment_is_done_after_one_answer() -> None:
    environment = Verifiers(SimpleNamespace(rubric=SimpleNamespace(funcs=[correct], weights=[1.0])))
    await environment.reset(COLUMNS, 0)
    assert (await environment.step(says("5"))).done
    assert await environment.reward() == 0.0


async def test_a_reward_function_that_raises_is_no_zero() -> None:
    def broken(completion: list[Any]) -> float:
        raise KeyError("lost")

    environment = Verifiers(SimpleNamespace(rubric=SimpleNamespace(funcs=[broken], weights=[1.0])))
    await environment.reset(COLUMNS, 0)
    await environment.step(says("4"))
    with pytest.raises(KeyError):
        await environment.reward()


async def test_episodes_of_one_environment_do_not_share_state() -> None:
    shared = Older()
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
        Verifiers(SimpleNamespace(rubric=SimpleNamespace(funcs=[spread], weights=[1.0])))
