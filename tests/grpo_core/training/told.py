"""Groups as shards tell of them, written by hand."""

from __future__ import annotations

from typing import Any

from grpo_core.training.feed import BufferedGroup
from storage.layout import PartName


def facts(**changes: Any) -> dict[str, Any]:
    """Those of one rollout of one turn, without tools or environment."""
    return {
        "finish_reason": "stop", "prompt_length": 3, "turns": 1, "tool_calls": 0, "tool_failures": 0, "tool_seconds": 0.0,
        "submitted_at": 10.0, "finished_at": 14.0, "joins_clean": 0, "joins_realign": 0, "joins_fork": 0,
        "drift_tokens": 0, "drift_max": 0, "tool_rounds": 0, "unknown_tool_calls": 0, "malformed_tool_calls": 0,
        "tool_usage": [], "environment_usage": [], "failed_requests": 0, "aborted_requests": 0, "discarded_tokens": 0,
        "scoring_wait_seconds": 0.0, "scoring_seconds": 0.0,
    } | changes  # fmt: skip


def use(name: str, calls: int, seconds: float, failures: int = 0) -> dict[str, Any]:
    """The calls of one tool, or of one method of an environment."""
    return {"name": name, "calls": calls, "failures": failures, "seconds": seconds}


def group(
    ordinal: int, lengths: tuple[int, ...], *made: dict[str, Any], rollouts: tuple[int, ...] | None = None
) -> BufferedGroup:
    """A group whose rollouts have these lengths and facts; `rollouts` are those of its rows."""
    members = tuple(range(len(lengths))) if rollouts is None else rollouts
    return BufferedGroup(
        ordinal, PartName(1, 0, 0), tuple(range(len(members))), members, (0.0,) * len(lengths), 0, 0, 0, 0, None, False,
        lengths=lengths, facts=made,
    )  # fmt: skip
