"""What tests ask of an engine's client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_core.rollout.engine import EngineClient
from grpo_core.rollout.wire import InvalidGeneration
from grpo_core.trajectory import Turn


async def one_turn(client: EngineClient, prompt_ids: Sequence[int], **request: Any) -> Turn:
    """One continuation of a prompt. Raises InvalidGeneration when it cannot be believed."""
    (turn,) = await client.generate_many(prompt_ids, 1, **request)
    if isinstance(turn, InvalidGeneration):
        raise turn
    return turn
