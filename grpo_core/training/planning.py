"""What a step does, from the groups that it trains: advantages, updates, micro-batches, denominators.

Contract: a pure function on plain data. Groups stay whole: each belongs to one optimizer update, and the updates take
the groups in order, as evenly as they divide. Fillers, which train nothing, come behind the sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from grpo_core.objective.credit import Credit, any_advantage, step_advantages
from grpo_core.objective.losses import Denominators
from grpo_core.training.batch import Row
from grpo_core.training.sharing import pack_groups
from grpo_core.training.step import FILLER, Place, StepPlan

if TYPE_CHECKING:
    from grpo_core.config import RunConfig
    from grpo_core.training.feed import BufferedGroup


class SequenceTooLong(RuntimeError):
    """A group to be trained has a sequence that no micro-batch can hold; the message names its ordinal."""


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    """A group as a step takes it; every list has one entry per sequence, a rollout's for each of its sequences.
    `trained`: whether its tokens may have a gradient at all; `positive`: whether it was rewarded."""

    ordinal: int
    places: Sequence[Place]
    rows: Sequence[Row]
    advantages: Sequence[float]
    trained: Sequence[bool]
    positive: Sequence[bool]


def step_credit(
    groups: Sequence[BufferedGroup], rows: Sequence[Sequence[Row]], config: RunConfig, *, oldest_version: int
) -> Credit:
    """The advantages of a step's groups, whose `rows` are given by group; an unknown score is NaN. Tokens of versions
    below `oldest_version` are not trained."""
    sources = dict.fromkeys(name for group in groups for name in group.components)
    unknown = (math.nan,) * config.grpo.num_generations_per_prompt
    trainable = np.zeros((len(groups), config.grpo.num_generations_per_prompt))
    for number, group in enumerate(groups):
        for rollout, row in zip(group.rollouts, rows[number], strict=True):
            trainable[number, rollout] += row.fresh(oldest_version).sum()
    return step_advantages(
        [group.rewards for group in groups],
        config.grpo,
        lengths=[group.lengths for group in groups],
        truncated=[group.truncated for group in groups],
        trainable=trainable,
        components={name: [group.components.get(name, unknown) for group in groups] for name in sources},
        weights=config.reward_weights,
    )


def plan_step(
    step: int,
    groups: Sequence[TrainedGroup],
    *,
    ranks: int,
    token_budget: int,
    share_prefixes: bool,
    minibatches: int,
    version: int,
    oldest_version: int,
    max_completion_length: int,
    learning_rate: float,
) -> StepPlan:
    """The plan of step `step` on `ranks` ranks. `minibatches`: number of optimizer updates, at most one per group.
    Raises SequenceTooLong."""
    rows = [row for group in groups for row in group.rows]
    numbers = [number for number, group in enumerate(groups) for _ in group.rows]
    micro_batches: list[list[list[int]]] = []
    updates, fillers = [], 0
    for chosen in np.array_split(np.arange(len(groups)), min(minibatches, len(groups))):
        inside = frozenset(chosen.tolist())
        indices = [index for index, number in enumerate(numbers) if number in inside]
        plan, added = pack_groups(
            [rows[index].ids for index in indices],
            [numbers[index] for index in indices] if share_prefixes else None,
            rows=ranks,
            token_budget=token_budget,
        )
        if plan.oversize:
            index = indices[plan.oversize[0]]
            raise SequenceTooLong(
                f"step {step}: a sequence of ordinal {groups[numbers[index]].ordinal} has {len(rows[index].ids)} tokens, "
                f"more than packing.token_budget={token_budget}; raise it"
            )
        names = [*indices, *range(len(rows) + fillers, len(rows) + fillers + added)]
        micro_batches += [[[names[place] for place in row] for row in batch] for batch in plan.micro_batches]
        updates.append(len(plan.micro_batches))
        fillers += added
    gradient = [may for group in groups for may in group.trained]
    positive = [rewarded for group in groups for rewarded in group.positive]
    trained = [int(row.fresh(oldest_version).sum()) if may else 0 for row, may in zip(rows, gradient, strict=True)]
    return StepPlan(
        step=step,
        places=[place for group in groups for place in group.places] + [FILLER] * fillers,
        advantages=[float(value) for group in groups for value in group.advantages] + [0.0] * fillers,
        micro_batches=micro_batches,
        oldest_version=oldest_version,
        denominators=_denominators(trained, positive, max_completion_length),
        learning_rate=learning_rate,
        updates=tuple(updates),
        groups=numbers + list(range(len(groups), len(groups) + fillers)) if share_prefixes else [],
        trained=gradient + [False] * fillers,
        positive=positive + [False] * fillers,
        version=version,
    )


def _denominators(trained: Sequence[int], positive: Sequence[bool], max_completion_length: int) -> Denominators:
    """Those of the whole step, from the trained tokens of each sequence and whether it was rewarded."""
    sequences = float(sum(tokens > 0 for tokens in trained))
    return Denominators(
        tokens=float(sum(trained)),
        sequences=sequences,
        constant=sequences * max_completion_length,
        positive_tokens=float(sum(tokens for tokens, rewarded in zip(trained, positive, strict=True) if rewarded)),
    )


def teaches(group: BufferedGroup, config: RunConfig) -> bool:
    """Whether any rollout of a group would have an advantage, whatever other groups its step trains."""
    return any_advantage(
        group.rewards,
        config.grpo,
        lengths=group.lengths,
        truncated=group.truncated,
        components=group.components,
        weights=config.reward_weights,
    )
