"""Calls are found in what a policy writes, and what cannot be read is a call with a fault, never an exception."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.rollout.tool_calls import Answer, ToolCall, ToolFormat, parse_answer

ADD = ToolCall("add", {"a": 1, "b": "x"})
CALL = '{"name": "add", "arguments": {"a": 1, "b": "x"}}'
LLAMA_CALL = CALL.replace("arguments", "parameters")
FORMATS: tuple[ToolFormat, ...] = ("hermes", "llama", "mistral", "pythonic")


@pytest.mark.parametrize(
    ("tool_format", "text", "answer"),
    [
        ("hermes", f"I add.\n<tool_call>\n{CALL}\n</tool_call>", Answer("I add.", (ADD,))),
        ("hermes", f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>", Answer("", (ADD, ADD))),
        ("hermes", f"<tool_call>{CALL}", Answer("", (ADD,))),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', Answer("", (ToolCall("now"),))),
        ("hermes", "no call", Answer("no call")),
        ("hermes", " no call\n", Answer(" no call\n")),
        ("llama", LLAMA_CALL, Answer("", (ADD,))),
        ("llama", f"<|python_tag|>{LLAMA_CALL}; {LLAMA_CALL}", Answer("", (ADD, ADD))),
        ("llama", '{"answer": 3}', Answer('{"answer": 3}')),
        ("llama", "so {x}", Answer("so {x}")),
        ("mistral", f"First.[TOOL_CALLS][{CALL}, {CALL}]", Answer("First.", (ADD, ADD))),
        ("mistral", "no call", Answer("no call")),
        ("pythonic", "[add(a=1, b='x'), now()]", Answer("", (ADD, ToolCall("now")))),
        ("pythonic", "[1, 2]", Answer("[1, 2]")),
        ("pythonic", "[x](y)", Answer("[x](y)")),
    ],
)
def test_calls_are_read(tool_format: ToolFormat, text: str, answer: Answer) -> None:
    assert parse_answer(text, tool_format) == answer


@pytest.mark.parametrize(
    ("tool_format", "text", "fault"),
    [
        ("hermes", "<tool_call>{'name': add}</tool_call>", "not JSON"),
        ("hermes", "<tool_call>[1]</tool_call>", "not an object with name and arguments"),
        ("hermes", '<tool_call>{"name": 3}</tool_call>', "not an object with name and arguments"),
        ("llama", '{"name": "add", "para', "not JSON"),
        ("mistral", "[TOOL_CALLS][{", "not JSON"),
        ("pythonic", "[add(1)]", "not name(argument=value"),
        ("pythonic", "[add(a=b)]", "not literal values"),
        ("pythonic", "[add(a=", "not Python"),
        ("pythonic", "[add(a={[]: 1})]", "not literal values"),
        ("pythonic", f"[add(a={'-' * 5000}1)]", "not Python"),
        ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", "not JSON"),
        ("mistral", f"[TOOL_CALLS]{'[' * 100_000}", "not JSON"),
        ("llama", '{"name":' * 100_000, "not JSON"),
        ("hermes", f"<tool_call>{'[' * 400}{']' * 400}</tool_call>", "not an object with name and arguments"),
        ("pythonic", "[add(a={[1]})]", "not literal values"),
        ("pythonic", "[add(a={[1]: 2})]", "not literal values"),
        ("pythonic", "[add(**{'a': 1})]", "not name(argument=value"),
        ("pythonic", f"[add(a={'+'.join('1' * 5000)})]", "not Python"),
        ("pythonic", f"[a{'.a' * 5000}()]", "not Python"),
    ],
)
def test_a_malformed_call_has_a_fault_and_stays_in_the_text(tool_format: ToolFormat, text: str, fault: str) -> None:
    answer = parse_answer(text, tool_format)
    (call,) = answer.calls
    assert call.name == "" and call.fault is not None and fault in call.fault
    assert answer.content == text


@pytest.mark.parametrize("given_arguments", ["[1]", '"no"', "3"])
def test_a_call_whose_arguments_are_no_object_keeps_its_name(given_arguments: str) -> None:
    text = f'<tool_call>{{"name": "add", "arguments": {given_arguments}}}</tool_call>'
    (call,) = parse_answer(text, "hermes").calls
    assert call.name == "add" and call.fault is not None


DEEP = "[" * 400 + "]" * 400


@pytest.mark.parametrize(
    ("tool_format", "text", "fault"),
    [
        ("pythonic", "[add(a=b'x')]", "not all JSON values"),
        ("pythonic", "[add(a={1, 2})]", "not all JSON values"),
        ("pythonic", "[add(a=...)]", "not all JSON values"),
        ("pythonic", "[add(a=2j)]", "not all JSON values"),
        ("pythonic", "[add(a={(1, 2): 3})]", "not all JSON values"),
        ("pythonic", "[add(a=1e999)]", "not all JSON values"),
        ("pythonic", f"[add(a=0x{'f' * 5000})]", "not all JSON values"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "not all JSON values"),
        ("hermes", f'<tool_call>{{"name": "add", "arguments": {{"a": {DEEP}}}}}</tool_call>', "32 levels"),
        ("hermes", f'<tool_call>{{"name": "add", "arguments": {DEEP}}}</tool_call>', "not an object"),
        ("hermes", f'<tool_call>{{"name": "add", "arguments": "{"[" * 100_000}"}}</tool_call>', "not JSON"),
        ("llama", f'{{"name": "add", "parameters": {{"a": {DEEP}}}}}', "32 levels"),
        ("mistral", f'[TOOL_CALLS][{{"name": "add", "arguments": {{"a": {DEEP}}}}}]', "32 levels"),
    ],
)
def test_arguments_that_are_no_json_values_are_a_fault_of_their_call(
    tool_format: ToolFormat, text: str, fault: str
) -> None:
    (call,) = parse_answer(text, tool_format).calls
    assert (call.name, call.arguments) == ("add", {}) and call.fault is not None and fault in call.fault


def test_arguments_are_as_json_has_them() -> None:
    (call,) = parse_answer("[add(a=(1, 2), b={3: None})]", "pythonic").calls
    assert call == ToolCall("add", {"a": [1, 2], "b": {"3": None}})
    (call,) = parse_answer('<tool_call>{"name": "add", "arguments": {"a": [[1]]}}</tool_call>', "hermes").calls
    assert call.arguments == {"a": [[1]]}


def test_no_depth_makes_the_parser_raise() -> None:
    """Reading, copying and showing a value each run out of stack at a depth of their own."""
    for depth in range(850, 1000):
        deep = "[" * depth + "]" * depth
        for value in (
            deep,
            f'{{"name": "add", "arguments": {deep}}}',
            f'{{"name": "add", "arguments": {{"a": {deep}}}}}',
        ):
            (call,) = parse_answer(f"<tool_call>{value}</tool_call>", "hermes").calls
            assert call.fault is not None


def test_arguments_may_be_json_within_json() -> None:
    text = f"<tool_call>{json.dumps({'name': 'add', 'arguments': json.dumps(ADD.arguments)})}</tool_call>"
    assert parse_answer(text, "hermes").calls == (ADD,)


@given(st.text(alphabet='<tool_cal>/{}[]()"name:=, 1x\\;TOOL_CALLS|', max_size=60), st.sampled_from(FORMATS))
def test_no_text_makes_the_parser_raise(text: str, tool_format: ToolFormat) -> None:
    for before in ("", "<tool_call>", "[TOOL_CALLS]", "{", "[a("):
        parse_answer(before + text, tool_format)
