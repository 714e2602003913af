"""Tool calls in what a policy wrote: text in, calls out. Pure functions; nothing is executed here.

    hermes    <tool_call>{"name": …, "arguments": {…}}</tool_call>, any number; also Qwen's
    llama     the whole answer is {"name": …, "parameters": {…}}, several separated by ";", with or without <|python_tag|>
    mistral   [TOOL_CALLS][{"name": …, "arguments": {…}}, …]
    pythonic  the whole answer is [name(argument=value, …), …] with literal values

A call that is begun but malformed is a call too: it has a `fault` and no name, so that the policy can be told. The
arguments of a call without a fault are plain JSON values, nested no deeper than DEEPEST: whoever copies, sends or
renders them may rely on it.
"""

from __future__ import annotations

import ast
import json
import re
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

ToolFormat = Literal["hermes", "llama", "mistral", "pythonic"]

HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
MISTRAL = "[TOOL_CALLS]"
LLAMA = "<|python_tag|>"
# Levels of arguments; no tool needs so many, and beyond some hundred neither templates nor copies can go.
DEEPEST = 32
# What json and ast raise about text; a policy nests as deeply and writes as odd literals as it likes. A SystemError
# comes from Pythons before 3.11.8, when two threads parse at once.
UNREADABLE = (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, SystemError)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. `fault` says why it cannot be made."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What the policy said besides its calls, and the calls in order."""

    content: str
    calls: tuple[ToolCall, ...] = ()


def parse_answer(text: str, tool_format: ToolFormat) -> Answer:
    """The calls in `text`, which is one whole answer without the token that ended it."""
    answer = _PARSERS[tool_format](text)
    # What could not be read stays in the text, where it can be seen.
    return answer if all(call.name for call in answer.calls) else Answer(text, answer.calls)


def _hermes(text: str) -> Answer:
    calls = tuple(_from_json(match[1], "arguments") for match in HERMES.finditer(text))
    return Answer(HERMES.sub("", text).strip() if calls else text, calls)


def _mistral(text: str) -> Answer:
    content, mark, listed = text.partition(MISTRAL)
    if not mark:
        return Answer(text)
    try:
        values = json.loads(listed)
    except UNREADABLE as error:
        return Answer(content.strip(), (_malformed(listed, f"it is not JSON ({error})"),))
    values = values if isinstance(values, list) else [values]
    return Answer(content.strip(), tuple(_from_value(value, "arguments") for value in values))


def _llama(text: str) -> Answer:
    body = text.strip().removeprefix(LLAMA).strip()
    if not body.startswith("{"):
        return Answer(text)
    decoder, calls, position = json.JSONDecoder(), [], 0
    while position < len(body):
        try:
            value, end = decoder.raw_decode(body, position)
        except UNREADABLE as error:
            calls.append(_malformed(body[position:], f"it is not JSON ({error})"))
            break
        if not isinstance(value, dict) or "name" not in value:
            # An answer in JSON that is no call.
            return Answer(text)
        calls.append(_from_value(value, "parameters"))
        position = end + len(re.match(r"[\s;]*", body[end:])[0])  # type: ignore[index]
    return Answer("", tuple(calls))


def _pythonic(text: str) -> Answer:
    body = text.strip()
    if not re.match(r"\[\s*[A-Za-z_][\w.]*\s*\(", body):
        return Answer(text)
    try:
        tree = ast.parse(body, mode="eval").body
        calls = tuple(map(_from_expression, tree.elts)) if isinstance(tree, ast.List) else None
    except UNREADABLE as error:
        return Answer("", (_malformed(body, f"it is not Python ({error})"),))
    return Answer(text) if calls is None else Answer("", calls)


def _from_expression(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        return _malformed(ast.unparse(node), "it is not name(argument=value, …)")
    name = ast.unparse(node.func)
    try:
        values = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    except UNREADABLE:
        return _malformed(ast.unparse(node), "its arguments are not literal values")
    return _call(name, values)


def _from_json(text: str, arguments: str) -> ToolCall:
    try:
        value = json.loads(text)
    except UNREADABLE as error:
        return _malformed(text, f"it is not JSON ({error})")
    return _from_value(value, arguments)


def _from_value(value: Any, arguments: str) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return _malformed(reprlib.repr(value), f"it is not an object with name and {arguments}")
    given = value.get(arguments, {})
    if isinstance(given, str):
        # Some policies write the arguments as JSON within JSON.
        try:
            given = json.loads(given)
        except UNREADABLE as error:
            return ToolCall(value["name"], fault=f"its {arguments} are not JSON ({error})")
    if not isinstance(given, dict):
        return ToolCall(value["name"], fault=f"its {arguments} are {reprlib.repr(given)}, not an object")
    return _call(value["name"], given)


def _call(name: str, arguments: dict[str, Any]) -> ToolCall:
    """The call, as JSON has its arguments."""
    try:
        plain = json.loads(json.dumps(arguments, allow_nan=False))
    except UNREADABLE as error:
        return ToolCall(name, fault=f"the arguments of {name} are not all JSON values ({error})")
    if _is_deeper(plain, DEEPEST):
        return ToolCall(name, fault=f"the arguments of {name} are nested more than {DEEPEST} levels deep")
    return ToolCall(name, plain)


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether `value` has more than so many levels of lists and objects."""
    if not isinstance(value, list | dict):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(each, levels - 1) for each in inner)


def _malformed(text: str, why: str) -> ToolCall:
    return ToolCall("", fault=f"the call {text.strip()[:100]!r} cannot be read: {why}")


_PARSERS: dict[ToolFormat, Callable[[str], Answer]] = {
    "hermes": _hermes,
    "llama": _llama,
    "mistral": _mistral,
    "pythonic": _pythonic,
}
