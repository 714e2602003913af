"""What an environment returned, checked once, where it comes in. Pure functions.

Contract: what passes is made of plain JSON values that nobody else holds: messages have a role and text, tools have a
name, `done` is a bool, a reward is a finite float or None. Everything behind this may rely on it. What does not pass
raises OutputFault, whose message begins with the field and shows the value.
"""

from __future__ import annotations

import json
import math
import numbers
import reprlib
from collections.abc import Mapping
from typing import Any

from grpo_core.rollout.environments import Opening, Step

# How an error shows a value: at most so many characters, and whatever its own repr does.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200


class OutputFault(ValueError):
    """Something that an environment must not return."""


def checked_opening(said: Any) -> Opening:
    """What a reset returned."""
    if not isinstance(said, Opening):
        raise _fault("the result", said, "an Opening")
    tools = tuple(_tool(f"tools[{number}]", tool) for number, tool in enumerate(_listed("tools", said.tools)))
    return Opening(_messages(said.messages), tools)


def checked_step(said: Any) -> Step:
    """What a step returned."""
    if not isinstance(said, Step):
        raise _fault("the result", said, "a Step")
    if not isinstance(said.done, bool):
        raise _fault("done", said.done, "True or False")
    return Step(_messages(said.messages), said.done)


def checked_reward(value: Any) -> float | None:
    """What a reward returned."""
    if value is None:
        return None
    try:
        number = float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _fault("the result", value, "a finite number, or None where there is no reward")
    return number


def tool_name(tool: Mapping[str, Any]) -> str:
    """The name in a tool's JSON schema, which may be wrapped in `function`."""
    return str(tool.get("function", tool)["name"])


def _messages(said: Any) -> tuple[dict[str, Any], ...]:
    return tuple(_message(f"messages[{number}]", message) for number, message in enumerate(_listed("messages", said)))


def _message(field: str, said: Any) -> dict[str, Any]:
    message = _plain(field, said)
    for name in ("role", "content"):
        if not isinstance(message.get(name), str):
            raise _fault(f"{field}.{name}", message.get(name), "text")
    if not message["role"]:
        raise _fault(f"{field}.role", "", "a role, such as user")
    return message


def _tool(field: str, said: Any) -> dict[str, Any]:
    tool = _plain(field, said)
    described = tool.get("function", tool)
    if not isinstance(described, dict):
        raise _fault(f"{field}.function", described, "an object with a name")
    name = described.get("name")
    if not isinstance(name, str) or not name:
        raise _fault(f"{field}.name", name, "a name")
    return tool


def _listed(field: str, said: Any) -> list[Any] | tuple[Any, ...]:
    if not isinstance(said, list | tuple):
        raise _fault(field, said, "a tuple or list")
    return said


def _plain(field: str, said: Any) -> dict[str, Any]:
    """A copy of an object as JSON has it."""
    if not isinstance(said, Mapping):
        raise _fault(field, said, "an object")
    try:
        text = json.dumps(dict(said), ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise _fault(field, said, f"JSON values in UTF-8 ({error})") from error
    copied: dict[str, Any] = json.loads(text)
    return copied


def _fault(field: str, value: Any, wanted: str) -> OutputFault:
    return OutputFault(f"{field} is {_SHORT.repr(value)}; return {wanted}")
