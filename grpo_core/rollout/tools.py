"""The functions a policy may call: their schemas, and their calls within a turn.

Invariants: every call of a turn gets exactly one tool message, in the order of the calls; what goes wrong in a tool, a
call of an unknown tool, wrong arguments and a missed deadline are messages too, for the policy to read, and never
end its rollout. The calls of a turn run side by side, each with its tool's own deadline. A plain tool that never
returns leaves its thread behind; when very many have, it is not the policy that must know:
CallsHang ends the lease with the cause.
"""

from __future__ import annotations

import copy
import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException, get_json_schema

from grpo_core.config import ToolFunction
from grpo_core.rollout.chat import well_formed
from grpo_core.rollout.concurrency import CallsHang, DeadlinePassed, ForeignCalls, together
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
class Tool:
    """A function and the longest time for one call of it."""

    function: Callable[..., Any]
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Toolbox:
    """Tools by name. `schemas` describe them to the chat template, in the same order."""

    tools: Mapping[str, Tool]
    schemas: tuple[dict[str, Any], ...]
    calls: ForeignCalls = field(default_factory=lambda: ForeignCalls("tools"))

    @classmethod
    def of(cls, named: Sequence[ToolFunction], *, timeout_seconds: float) -> Toolbox:
        """The named tools; `timeout_seconds` is for those that have none of their own. Raise ToolError for one that
        cannot be imported or described."""
        tools: dict[str, Tool] = {}
        schemas = []
        for each in named:
            try:
                function = imported(each.function, "tool")
            except ValueError as error:
                raise ToolError(str(error)) from error
            schemas.append(_schema(each.function, function))
            tools[schemas[-1]["function"]["name"]] = Tool(function, each.timeout_seconds or timeout_seconds)
        return cls(tools, tuple(schemas))

    async def call_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """The results of the calls of one turn, in order. Raise CallsHang."""
        return await together(self.call(call) for call in calls)

    async def call(self, call: ToolCall) -> ToolResult:
        """The result of one call; nothing that the tool or the policy did wrong is raised, except CallsHang."""
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
            inspect.signature(tool.function).bind(**call.arguments)
        except TypeError as error:
            return _error(f"wrong arguments for {call.name}: {error}"), True
        # A tool may change what it is given, but not the history.
        run = partial(tool.function, **copy.deepcopy(call.arguments))
        try:
            return _shown(await self.calls.within(tool.timeout_seconds, run)), False
        except CallsHang:
            raise
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
    return well_formed(result) if isinstance(result, str) else json.dumps(result, default=str)


def _error(text: str) -> str:
    return json.dumps({"error": text})
