"""What a message of a rollout says, as one text: its content, and the tools that it calls."""

import json
from collections.abc import Mapping
from typing import Any


def message_text(message: Mapping[str, Any]) -> str:
    """Not escaped in any way. A call stands on a line of its own, as `→ name {arguments}`."""
    content = message.get("content")
    said = [] if content in (None, "") else [content if isinstance(content, str) else json.dumps(content)]
    functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
    called = [f"→ {function.get('name')} {json.dumps(function.get('arguments'))}" for function in functions]
    return "\n".join([*said, *called])
