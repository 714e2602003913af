"""Tools are described to the policy, run side by side, and whatever goes wrong in them is something it can read."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from grpo_core.config import ToolFunction
from grpo_core.recipe import parse
from grpo_core.rollout import concurrency
from grpo_core.rollout.concurrency import CallsHang
from grpo_core.rollout.tool_calls import ToolCall
from grpo_core.rollout.tools import Toolbox, ToolError, ToolResult
from tests.grpo_core.rollout import sample_tools

SAMPLES = "tests.grpo_core.rollout.sample_tools"


def toolbox(*names: str, timeout: float = 10) -> Toolbox:
    return Toolbox.of([ToolFunction(function=f"{SAMPLES}:{name}") for name in names], timeout_seconds=timeout)


async def result(call: ToolCall, *names: str, timeout: float = 10) -> ToolResult:
    (only,) = await toolbox(*names, timeout=timeout).call_all([call])
    return only


def test_a_schema_says_name_purpose_and_arguments() -> None:
    (schema,) = toolbox("look_up").schemas
    function = schema["function"]
    assert function["name"] == "look_up" and function["description"] == "Looks a number up."
    assert function["parameters"]["properties"]["times"] == {"type": "integer", "description": "How often."}
    assert function["parameters"]["required"] == ["key"]


def test_a_module_that_ends_the_process_when_it_is_imported_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaves_at_once.py").write_text("import sys; sys.exit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ToolError, match=r"leaves_at_once:tool cannot be imported \(SystemExit: 3\)"):
        Toolbox.of((ToolFunction(function="leaves_at_once:tool"),), timeout_seconds=1)


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


async def test_each_call_of_a_turn_has_the_deadline_of_its_tool() -> None:
    generation = {"tools": [f"{SAMPLES}:meet", {"function": f"{SAMPLES}:sleep", "timeout_seconds": 0.1}]}
    settings = parse({"generation": generation}, where="test").generation
    box = Toolbox.of(settings.tools, timeout_seconds=settings.tool_timeout_seconds)
    calls = [ToolCall("meet", {"who": who}) for who in "ab"]
    late, *others = await box.call_all([ToolCall("sleep", {"seconds": 1}), *calls, ToolCall("meet", {"who": "c"})])
    assert late.failed and "sleep failed: it did not return within 0.1 s" in late.content
    assert [each.content for each in others] == ["a", "b", "c"]


async def test_tools_that_never_return_are_counted_and_end_in_an_error_that_is_no_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(concurrency, "MOST_LEFT_BEHIND", 2)
    box = toolbox("wait", "calculator", timeout=0.05)
    results = await box.call_all([ToolCall("wait")] * 2)
    assert all(each.failed for each in results) and box.calls.left_behind == 2
    with pytest.raises(CallsHang, match="2 calls of tools have not returned"):
        await box.call(ToolCall("calculator", {"expression": "1"}))
    sample_tools.gate.set()
    while box.calls.left_behind:
        await asyncio.sleep(0.01)
    assert (await box.call(ToolCall("calculator", {"expression": "1"}))).content == "1"


@pytest.mark.parametrize("name", ["cancel", "cancel_awaited", "leave_awaited", "stop"])
async def test_nothing_that_a_tool_raises_is_taken_for_the_end_of_the_rollout(name: str) -> None:
    answer = await result(ToolCall(name), name)
    assert answer.failed and f"{name} raised RuntimeError: it raised" in json.loads(answer.content)["error"]


async def test_half_a_surrogate_pair_is_replaced() -> None:
    assert (await result(ToolCall("half_a_pair"), "half_a_pair")).content == "a\ufffd"
