"""Rollouts as rows of a shard, and the one row of a group without rollouts. Pure functions."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from grpo_core.config import NoEnvironment, RunConfig
from grpo_core.rollout.chat import well_formed
from grpo_core.rollout.effort import Effort
from grpo_core.rollout.reconcile import Tally, reconcile
from grpo_core.rollout.rewards import Scores
from grpo_core.trajectory import Prompt, Rollout
from grpo_core.trajectory import Sequence as TrainingSequence

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


def group_rows(
    config: RunConfig,
    prompt: Prompt,
    rollouts: Sequence[Rollout],
    scores: Scores,
    effort: Effort,
    *,
    note: str | None = None,
) -> list[dict[str, Any]]:
    """The rows of a whole group, one per sequence. `scores` are of these rollouts, in their order; `note` says why
    there are fewer than were asked for."""
    rows = []
    scoring = {"scoring_wait_seconds": scores.wait_seconds, "scoring_seconds": scores.seconds}
    for position, rollout in enumerate(rollouts):
        sequences, tally = reconcile(rollout.turns, fork_threshold_tokens=config.generation.fork_threshold_tokens)
        common = {**_facts(config, prompt, rollout.index), **_outcome(rollout, scores, position), **_joins(tally)}
        rows += [
            {
                **common,
                **asdict(effort),
                **scoring,
                "error": note and well_formed(note),
                "sequence": number,
                **_tokens(sequence),
            }
            for number, sequence in enumerate(sequences)
        ]
    return rows


def tombstone_row(config: RunConfig, prompt: Prompt, cause: str, effort: Effort) -> dict[str, Any]:
    """The one row of a group that failed for good."""
    return {**_facts(config, prompt, 0), **NO_ROLLOUT, **asdict(effort), "error": well_formed(cause)}


def _outcome(rollout: Rollout, scores: Scores, position: int) -> dict[str, Any]:
    reward = scores.rewards[position]
    return {
        "reward": None if math.isnan(reward) else reward,
        "reward_components": [(name, values[position]) for name, values in scores.components.items()],
        "finish_reason": rollout.finish_reason,
        "status": OK,
        "messages": json.dumps(rollout.messages, default=str),
        "turns": len(rollout.turns),
        "tool_calls": rollout.tool_calls,
        "tool_failures": rollout.tool_failures,
        "tool_seconds": rollout.tool_seconds,
        "tool_rounds": rollout.tool_rounds,
        "unknown_tool_calls": rollout.unknown_tool_calls,
        "malformed_tool_calls": rollout.malformed_tool_calls,
        "tool_usage": [asdict(usage) for usage in rollout.tool_usage],
        "environment_usage": [asdict(usage) for usage in rollout.environment_usage],
        "seed": rollout.seed,
        # Its turns may have been made by several engines; a reader that doubts one must find it here.
        "engine": ",".join(sorted({turn.engine for turn in rollout.turns})),
        "submitted_at": rollout.turns[0].submitted_at,
        "first_token_at": rollout.turns[0].first_token_at,
        "finished_at": rollout.turns[-1].finished_at,
    }


def _joins(tally: Tally) -> dict[str, int]:
    return {
        "joins_clean": tally.clean,
        "joins_realign": tally.realign,
        "joins_fork": tally.fork,
        "drift_tokens": tally.drift_tokens,
        "drift_max": tally.drift_max,
    }


def _tokens(sequence: TrainingSequence) -> dict[str, Any]:
    spans = [{"attempt": s.attempt, "version": s.version, "start": s.start, "end": s.end} for s in sequence.spans]
    return {
        "prompt_length": sequence.prompt_length,
        "token_ids": sequence.ids,
        "loss_mask": [bool(trained) for trained in sequence.mask],
        "logprobs": sequence.logprobs,
        "version_spans": spans,
        "min_version": min(span.version for span in sequence.spans),
        "max_version": max(span.version for span in sequence.spans),
    }


def _facts(config: RunConfig, prompt: Prompt, rollout: int) -> dict[str, Any]:
    sampling, environment = config.sampling, config.environment
    return {
        "run_id": config.run_id,
        "ordinal": prompt.ordinal,
        "group_id": f"{config.run_id}-{prompt.ordinal}",
        "rollout": rollout,
        "epoch": prompt.epoch,
        "dataset_index": prompt.dataset_index,
        "environment": config.data.source.kind if isinstance(environment, NoEnvironment) else environment.kind,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": config.generation.max_completion_length,
    }
