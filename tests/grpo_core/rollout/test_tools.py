"""Tools are described to the policy, run side by side, and whatever goes wrong in them is something it can read."""

from __future__ import annotations

import json

import pytest

from grpo_core.rollout.tool_calls import ToolCall
from grpo_core.rollout.tools import Toolbox, ToolError, ToolResult

SAMPLES = "tests.grpo_core.rollout.sample_tools"


def toolbox(*names: str, timeout: float = 10) -> Toolbox:
    return Toolbox.of([f"{SAMPLES}:{name}" for name in names], timeout_seconds=timeout)


async def result(call: ToolCall, *names: str, timeout: float = 10) -> ToolResult:
    (only,) = await toolbox(*names, timeout=timeout).call_all([call])
    return only


def test_a_schema_says_name_purpose_and_arguments() -> None:
    (schema,) = toolbox("look_up").schemas
    function = schema["function"]
    assert function["name"] == "look_up" and function["description"] == "Looks a number up."
    assert function["parameters"]["properties"]["times"] == {"type": "integer", "description": "How often."}
    assert function["parameters"]["required"] == ["key"]


@pytest.mark.parametrize(("name", "message"), [("undescribed", "type hints"), ("nothing", "cannot be imported")])
def test_a_tool_that_cannot_be_offered_is_refused(name: str, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        toolbox(name)


async def test_text_is_shown_as_it_is_and_values_as_json() -> None:
    both = toolbox("calculator", "look_up")
    first, second = await both.call_all(
        [ToolCall("calculator", {"expression": "1 + 2"}), ToolCall("look_up", {"key": "x"})]
    )
    assert (first.content, first.failed) == ("3", False)
    assert (second.content, second.failed) == ('{"x": 1}', False)


@pytest.mark.parametrize("name", ["meet", "meet_awaited"])
async def test_the_calls_of_a_turn_run_side_by_side(name: str) -> None:
    """Each waits for the two others."""
    results = await toolbox(name).call_all([ToolCall(name, {"who": who}) for who in "abc"])
    assert [each.content for each in results] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (ToolCall("calculator", {"expression": "one"}), "calculator raised ValueError: invalid literal"),
        (ToolCall("calculator", {"expresion": "1"}), "wrong arguments for calculator: missing a required argument"),
        (ToolCall("sleep", {"seconds": 5}), "sleep failed: it did not return within 0.2 s"),
        (ToolCall("leave"), "SystemExit"),
        (ToolCall("divide", {"a": 1}), "there is no tool 'divide'; the tools are calculator, sleep, leave"),
        (ToolCall("", fault="it is not JSON"), "it is not JSON"),
    ],
)
async def test_what_goes_wrong_is_an_answer(call: ToolCall, message: str) -> None:
    answer = await result(call, "calculator", "sleep", "leave", timeout=0.2)
    assert answer.failed and message in json.loads(answer.content)["error"]
