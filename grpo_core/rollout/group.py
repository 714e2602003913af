"""From one prompt to one whole, scored group, as rows of a shard.

Invariants: token ids go in and out, text is never tokenized again; every request has a deadline and a seed derived
from (run seed, ordinal, turn), from which the engine derives one for each sibling; a rollout that fails is tried again
within its budget, and when one fails for good the whole group becomes a tombstone: one row with status `failed` and the
cause, never a zero reward.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from grpo_core.config import RunConfig
from grpo_core.rollout.chat import Chat, ChatError
from grpo_core.rollout.engine import EngineClient, EngineRejected, EngineUnavailable
from grpo_core.rollout.pool import NoEngine, Pool
from grpo_core.rollout.reconcile import reconcile
from grpo_core.rollout.rewards import RewardError, RewardWorkers, Scores
from grpo_core.rollout.wire import InvalidGeneration
from grpo_core.trajectory import Prompt, Rollout, Turn

OK, FAILED = "ok", "failed"
# The columns of a row without a rollout.
NO_ROLLOUT: dict[str, Any] = {
    "sequence": 0,
    "prompt_length": 0,
    "token_ids": [],
    "loss_mask": [],
    "logprobs": [],
    "version_spans": [],
    "engine": "",
    "finish_reason": "error",
    "status": FAILED,
    "messages": "[]",
    "turns": 0,
    "tool_calls": 0,
    "tool_failures": 0,
}


class RolloutFailed(RuntimeError):
    """A rollout that failed more often than its budget allows; the message names the last cause."""


@dataclass(frozen=True, slots=True)
class Generator:
    """What is needed to turn prompts into groups. Shared by all leases of a process."""

    config: RunConfig
    chat: Chat
    pool: Pool
    rewards: RewardWorkers

    async def group(self, prompt: Prompt, session: aiohttp.ClientSession, *, attempt: int) -> list[dict[str, Any]]:
        """The rows of one group, scored, or its tombstone."""
        size = self.config.grpo.num_generations_per_prompt
        seed = derived_seed(self.config.seed, prompt.ordinal, 0)
        try:
            turns = await self.siblings(
                self.chat.render(prompt.messages),
                size,
                session,
                request_id=f"{self.config.run_id}-{attempt}-{prompt.ordinal}-0",
                seed=seed,
                temperature=self.config.sampling.temperature,
            )
            rollouts = [self._rollout(prompt, member, turn, seed) for member, turn in enumerate(turns)]
            scores = await asyncio.to_thread(self._score, prompt, rollouts)
        except (ChatError, RolloutFailed, RewardError) as error:
            return self.tombstone(prompt, f"{type(error).__name__}: {error}")
        return [row for rollout in rollouts for row in self._rows(prompt, rollout, scores)]

    def tombstone(self, prompt: Prompt, cause: str) -> list[dict[str, Any]]:
        """The one row of a group that failed for good."""
        return [{**self._facts(prompt, 0), **NO_ROLLOUT, "error": cause}]

    def _rollout(self, prompt: Prompt, member: int, turn: Turn, seed: int) -> Rollout:
        messages = [*prompt.messages, {"role": "assistant", "content": self.chat.text(turn.output_ids)}]
        return Rollout(member, [turn], messages, turn.finish_reason, seed)

    async def siblings(
        self,
        ids: Sequence[int],
        count: int,
        session: aiohttp.ClientSession,
        *,
        request_id: str,
        seed: int,
        temperature: float,
    ) -> list[Turn]:
        """`count` continuations of one prompt, tried on other engines within the budget. Raise RolloutFailed.

        One request for all of them: the prompt is read once, and the server's own work per rollout falls fourfold.
        """
        config = self.config
        budget = min(config.generation.max_completion_length, config.model.context_length - len(ids))
        if budget < 1:
            raise RolloutFailed(
                f"the prompt has {len(ids)} tokens and leaves no room in model.context_length={config.model.context_length}; shorten it"
            )
        for tried in range(1, config.generation.max_rollout_attempts + 1):
            try:
                async with self.pool.engine(weight=count, deadline_seconds=config.pool.start_timeout_seconds) as member:
                    client = EngineClient(member.url, session=session, name=member.name)
                    return await client.generate_many(
                        ids,
                        count,
                        request_id=f"{request_id}-{tried}",
                        sampling=config.sampling.model_copy(update={"temperature": temperature}),
                        max_tokens=budget,
                        seed=seed,
                        stop_token_ids=self.chat.stop_token_ids,
                        cache_salt=str(self.pool.stamp),
                        deadline_seconds=config.generation.request_timeout_seconds,
                    )
            except (EngineRejected, NoEngine) as error:
                raise RolloutFailed(str(error)) from error
            except (EngineUnavailable, InvalidGeneration) as error:
                cause = error
                # An engine that just died is ejected within a second; asking it again at once would spend the budget.
                await asyncio.sleep(min(8.0, 0.5 * 2**tried))
        raise RolloutFailed(
            f"{config.generation.max_rollout_attempts} attempts failed, the last with: {cause}"
        ) from cause

    def _score(self, prompt: Prompt, rollouts: list[Rollout]) -> Scores:
        size = len(rollouts)
        return self.rewards.score(
            prompts=[prompt.messages] * size,
            completions=[rollout.messages[len(prompt.messages) :] for rollout in rollouts],
            completion_ids=[[token for turn in rollout.turns for token in turn.output_ids] for rollout in rollouts],
            columns={name: [value] * size for name, value in prompt.columns.items()},
        )

    def _rows(self, prompt: Prompt, rollout: Rollout, scores: Scores) -> list[dict[str, Any]]:
        sequences, _ = reconcile(rollout.turns, fork_threshold_tokens=self.config.generation.fork_threshold_tokens)
        reward = scores.rewards[rollout.index]
        outcome = {
            "reward": None if math.isnan(reward) else reward,
            "reward_components": [(name, values[rollout.index]) for name, values in scores.components.items()],
            "finish_reason": rollout.finish_reason,
            "status": OK,
            "messages": json.dumps(rollout.messages),
            "turns": len(rollout.turns),
            "tool_calls": rollout.tool_calls,
            "tool_failures": rollout.tool_failures,
            "tool_seconds": rollout.tool_seconds,
            "seed": rollout.seed,
            "engine": rollout.turns[0].engine,
            "submitted_at": rollout.turns[0].submitted_at,
            "first_token_at": rollout.turns[0].first_token_at,
            "finished_at": rollout.turns[-1].finished_at,
        }
        rows = []
        for number, sequence in enumerate(sequences):
            spans = [
                {"attempt": s.attempt, "version": s.version, "start": s.start, "end": s.end} for s in sequence.spans
            ]
            tokens = {
                "sequence": number,
                "prompt_length": sequence.prompt_length,
                "token_ids": sequence.ids,
                "loss_mask": [bool(trained) for trained in sequence.mask],
                "logprobs": sequence.logprobs,
                "version_spans": spans,
                "min_version": min(span.version for span in sequence.spans),
                "max_version": max(span.version for span in sequence.spans),
            }
            rows.append({**self._facts(prompt, rollout.index), **outcome, **tokens})
        return rows

    def _facts(self, prompt: Prompt, member: int) -> dict[str, Any]:
        sampling = self.config.sampling
        return {
            "run_id": self.config.run_id,
            "ordinal": prompt.ordinal,
            "group_id": f"{self.config.run_id}-{prompt.ordinal}",
            "rollout": member,
            "epoch": prompt.epoch,
            "dataset_index": prompt.dataset_index,
            "environment": self.config.data.source.kind,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "max_tokens": self.config.generation.max_completion_length,
        }


def derived_seed(*parts: int) -> int:
    """A seed below 2⁶³ that is different for different parts."""
    text = ".".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
