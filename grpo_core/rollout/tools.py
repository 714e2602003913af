"""The functions a policy may call: their schemas, and their calls within a turn.

Invariants: every call of a turn gets exactly one tool message, in the order of the calls; what goes wrong in a tool, a
call of an unknown tool, wrong arguments and a missed deadline are messages too, for the policy to read, and never
end its rollout. The calls of a turn run side by side.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException, get_json_schema

from grpo_core.rollout.concurrency import DeadlinePassed, call_within, together
from grpo_core.rollout.importable import imported
from grpo_core.rollout.tool_calls import ToolCall


class ToolError(ValueError):
    """A tool that cannot be offered to a policy."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the policy reads after a call. `seconds` is its duration."""

    content: str
    failed: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class Toolbox:
    """Tools by name. `schemas` describe them to the chat template, in the same order."""

    tools: Mapping[str, Callable[..., Any]]
    schemas: tuple[dict[str, Any], ...]
    timeout_seconds: float

    @classmethod
    def of(cls, names: Sequence[str], *, timeout_seconds: float) -> Toolbox:
        """The tools called `module:function`. Raise ToolError for one that cannot be imported or described."""
        tools: dict[str, Callable[..., Any]] = {}
        schemas = []
        for name in names:
            try:
                tool = imported(name, "tool")
            except ValueError as error:
                raise ToolError(str(error)) from error
            schemas.append(_schema(name, tool))
            tools[schemas[-1]["function"]["name"]] = tool
        return cls(tools, tuple(schemas), timeout_seconds)

    async def call_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """The results of the calls of one turn, in order."""
        return await together(self.call(call) for call in calls)

    async def call(self, call: ToolCall) -> ToolResult:
        """The result of one call; never raises for anything that the tool or the policy did wrong."""
        began = time.monotonic()
        content, failed = await self._outcome(call)
        return ToolResult(content, failed, time.monotonic() - began)

    async def _outcome(self, call: ToolCall) -> tuple[str, bool]:
        if call.fault is not None:
            return _error(call.fault), True
        tool = self.tools.get(call.name)
        if tool is None:
            return _error(f"there is no tool {call.name!r}; the tools are {', '.join(self.tools) or 'none'}"), True
        try:
            inspect.signature(tool).bind(**call.arguments)
        except TypeError as error:
            return _error(f"wrong arguments for {call.name}: {error}"), True
        try:
            return _shown(await call_within(self.timeout_seconds, tool, **call.arguments)), False
        except DeadlinePassed as error:
            return _error(f"{call.name} failed: {error}"), True
        except Exception as error:  # noqa: BLE001 - the policy is told whatever a tool raises
            return _error(f"{call.name} raised {type(error).__name__}: {error}"), True


def _schema(name: str, tool: Callable[..., Any]) -> dict[str, Any]:
    try:
        schema: dict[str, Any] = get_json_schema(tool)
    except (DocstringParsingException, TypeHintParsingException, ValueError, AttributeError) as error:
        raise ToolError(
            f"tool {name} cannot be described to the policy: {error}; give it type hints and a Google-style docstring with Args"
        ) from error
    return schema


def _shown(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, default=str)


def _error(text: str) -> str:
    return json.dumps({"error": text})
