"""The metrics of a step, as pure functions from what it trained, what was given up and how long it took.

Contract: names and reductions are those of grpo_core.metrics; a ratio is a pair (numerator, denominator). What a shard
does not say, such as the times of rollouts made by hand, is left out. Percentiles are those of the step (nearest rank).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from grpo_core.config import ObjectiveConfig
from grpo_core.metrics import Pair
from grpo_core.objective.settings import needs_old_policy
from grpo_core.refit.coordinator import RefitResult
from grpo_core.training.batch import Row
from grpo_core.training.feed import BufferedGroup
from grpo_core.training.flops import Machine, step_flops, utilisation
from grpo_core.training.step import FILLER, StepPlan, StepResult

Measures = dict[str, float | Pair]
# Causes of waste in groups that are trained.
MASKED, DISCARDED = "masked", "discarded"


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds of one step as rank 0 saw them: waiting for groups, planning, the step itself, and all from the end of
    the step before, which the first step of an attempt does not have."""

    wait: float
    plan: float
    step: float
    iteration: float | None


def length_measures(groups: Sequence[BufferedGroup], rows: Sequence[Row], trained: int) -> Measures:
    """Tokens of rollouts, turns and sequences. `rows` are those of the groups, group after group; `trained` tokens of
    them have a gradient."""
    owners = [(group.ordinal, rollout) for group in groups for rollout in group.rollouts]
    generated: Counter[tuple[int, int]] = Counter()
    turns: Counter[tuple[int, int]] = Counter()
    for owner, row in zip(owners, rows, strict=True):
        generated[owner] += int(row.generated.sum())
        turns[owner] = max(turns[owner], longest_turn(row))
    lengths, longest = list(generated.values()), list(turns.values())
    sizes = [len(row.ids) for row in rows]
    behind = sum(len(row.ids) - int(row.generated.sum()) - _prompt(row) for row in rows)
    facts = [fact for group in groups for fact in group.facts]
    measures: Measures = {
        "completion_tokens_mean": mean(lengths),
        "completion_tokens_min": float(min(lengths)),
        "completion_tokens_max": float(max(lengths)),
        "turn_tokens_mean": mean(longest),
        "turn_tokens_p95": percentile(longest, 0.95),
        "turn_tokens_max": float(max(longest)),
        "environment_tokens_mean": (float(behind), float(len(rows))),
        "sequence_tokens_mean": mean(sizes),
        "sequence_tokens_max": float(max(sizes)),
        "trained_tokens_mean": (float(trained), float(len(rows))),
    }
    return measures | ({"prompt_tokens_mean": mean([fact["prompt_length"] for fact in facts])} if facts else {})


def longest_turn(row: Row) -> int:
    """The longest stretch of generated tokens: between two turns there is always a token of the template or a tool."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], row.generated, [False]]).astype(np.int8)))
    return int((edges[1::2] - edges[::2]).max(initial=0))


def composition_measures(
    plan: StepPlan,
    groups: Sequence[BufferedGroup],
    rows: Sequence[Row],
    result: StepResult,
    *,
    trained: int,
    token_budget: int,
) -> Measures:
    """How much the step held and how it was packed. `rows` are those of plan.places, fillers included."""
    real = [place for place in range(len(rows)) if plan.places[place].part != FILLER.part]
    sizes = np.array([len(row.ids) for row in rows])
    loads = [[int(sizes[row].sum()) for row in batch] for batch in plan.micro_batches]
    batches = float(sum(len(batch) for batch in plan.micro_batches))
    forwarded = int(sizes[real].sum())
    saved = result.pairs.get("prefix_tokens_saved", (0.0, 0.0))[0]
    advantages = [plan.advantages[place] for place in real if not plan.trained or plan.trained[place]]
    measures: Measures = {
        "ranks": float(len(plan.micro_batches[0])),
        "epoch": float(max(group.epoch for group in groups)),
        "groups": float(len(groups)),
        "rollouts": float(sum(len(set(group.rollouts)) for group in groups)),
        "sequences": float(len(real)),
        "trained_sequences": plan.denominators.sequences,
        "forwarded_tokens": float(forwarded),
        "trained_tokens": float(trained),
        "untrained_token_share": (float(forwarded - trained), float(forwarded)),
        "updates": float(result.updates),
        "micro_batches": float(len(plan.micro_batches)),
        "sequences_per_micro_batch": (float(len(real)), batches),
        "micro_batch_tokens_mean": (float(sizes.sum()) - saved, batches),
        "micro_batch_fill": (float(sizes.sum()) - saved, batches * token_budget),
        "rank_imbalance": (sum(max(load) * len(load) / sum(load) for load in loads), float(len(loads))),
        "learning_rate": plan.learning_rate,
    }
    if advantages:
        measures |= {"advantage_min": min(advantages), "advantage_max": max(advantages)}
    return measures


def weight_measures(pairs: Mapping[str, Pair]) -> Measures:
    """The effective sample size of the importance weights, (Σ w)² / Σ w², in tokens."""
    (total, _), (squares, _) = (
        pairs.get(name, (0.0, 0.0)) for name in ("importance_weight", "importance_weight_squared")
    )
    return {"effective_sample_size": total**2 / squares} if squares else {}


def lag_measures(lags: np.ndarray) -> Measures:
    """Lag of the trained tokens, and how many tokens had each."""
    values, counts = np.unique(lags, return_counts=True)
    return {
        "lag_mean": (float(lags.sum()), float(len(lags))),
        "lag_max": float(lags.max(initial=0)),
        **{f"lag_tokens/{lag}": float(count) for lag, count in zip(values.tolist(), counts.tolist(), strict=True)},
    }


def waste_measures(
    trained: Sequence[BufferedGroup],
    dropped: Iterable[tuple[BufferedGroup, str]],
    returned: Iterable[tuple[BufferedGroup, str]],
    *,
    generated_tokens: int,
    trained_tokens: int,
) -> Measures:
    """What was generated and not trained, by cause, and whether training prefers short answers. `generated_tokens` are
    those of the trained groups' rollouts; what was discarded for others counts as such, or with its group."""
    measures: Measures = {}
    discarded = sum(map(discarded_tokens, trained))
    wasted: Counter[str] = Counter({MASKED: generated_tokens - trained_tokens, DISCARDED: discarded})
    decided = [group.lengths for group in trained]
    for family, groups in (("dropped_groups", dropped), ("returned_groups", returned)):
        reasons: Counter[str] = Counter()
        for group, reason in groups:
            reasons[reason] += 1
            wasted[reason] += sum(group.lengths) + discarded_tokens(group)
            decided.append(group.lengths)
        measures |= {f"{family}/{reason}": float(count) for reason, count in reasons.items()}
    measures |= {f"wasted_tokens/{cause}": float(tokens) for cause, tokens in wasted.items()}
    measures["wasted_token_share"] = (float(wasted.total()), float(trained_tokens + wasted.total()))
    kept, everything = (
        [length for lengths in each for length in lengths if length]
        for each in ([group.lengths for group in trained], decided)
    )
    if kept:
        measures["length_ratio"] = float(np.mean(kept) / np.mean(everything))
    return measures


def discarded_tokens(group: BufferedGroup) -> int:
    """Tokens that were generated for a group and are not in its rollouts."""
    return (group.facts[0]["discarded_tokens"] or 0) if group.facts else 0


def clock_measures(clock: Clock, result: StepResult, counts: Mapping[str, float | Pair]) -> Measures:
    """Times of the step, and the rates that follow from them and from what it counted."""
    trained, forwarded, rollouts = (_count(counts, name) for name in ("trained_tokens", "forwarded_tokens", "rollouts"))
    measures: Measures = {
        "wait_seconds": clock.wait,
        "plan_seconds": clock.plan,
        "step_seconds": clock.step,
        **result.phases,
        "forwarded_tokens_per_busy_second": (forwarded, clock.step),
    }
    if clock.iteration is None:
        return measures
    return measures | {
        "iteration_seconds": clock.iteration,
        "trainer_utilisation": (clock.step, clock.iteration),
        "wait_share": (clock.wait, clock.iteration),
        "trained_tokens_per_second": (trained, clock.iteration),
        "forwarded_tokens_per_second": (forwarded, clock.iteration),
        "rollouts_per_second": (rollouts, clock.iteration),
    }


def refit_measures(refits: Sequence[tuple[RefitResult, float]]) -> Measures:
    """Refits since the step before, each with its wall time in seconds."""
    if not refits:
        return {}
    phases: dict[str, float] = defaultdict(float)
    for result, _ in refits:
        for phase, seconds in result.seconds.items():
            phases[phase] += seconds
    return {
        "refit_seconds": sum(seconds for _, seconds in refits),
        "refit_bytes": float(sum(result.bytes for result, _ in refits)),
        "refit_canary": max((value for result, _ in refits for value in result.canary.values()), default=0.0),
        **{f"refit_phase_seconds/{phase}": float(seconds) for phase, seconds in phases.items()},
    }


def arithmetic_measures(
    machine: Machine, plan: StepPlan, rows: Sequence[Row], objective: ObjectiveConfig, clock: Clock
) -> Measures:
    """Model FLOPs utilisation with both denominators, where the peak is known. Shared prefixes count as if they were
    not: the arithmetic is what the sequences ask for."""
    updates = len(plan.micro_batches_by_update())
    scored = (float(objective.beta > 0)) + ((updates - 1) / updates if needs_old_policy(objective) else 0.0)
    flops = step_flops(
        machine.shape,
        [len(row.ids) for row in rows],
        sum(int(row.generated[1:].sum()) for row in rows),
        scored=scored,
    )
    measures: Measures = {"flops_per_second": (flops, clock.step * machine.devices)}
    if machine.peak_flops is None or clock.step <= 0:
        return measures
    shares = utilisation(
        flops,
        wall_seconds=clock.iteration or clock.step,
        busy_seconds=clock.step,
        peak_flops=machine.peak_flops,
        devices=machine.devices,
    )
    measures["mfu_of_busy"] = shares.of_busy
    return measures if clock.iteration is None else measures | {"mfu_of_wall": shares.of_wall}


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed."""
    return float(sorted(values)[math.ceil(share * len(values)) - 1])


def mean(values: Sequence[float]) -> Pair:
    return float(sum(values)), float(len(values))


def _count(counts: Mapping[str, float | Pair], name: str) -> float:
    value = counts[name]
    assert not isinstance(value, tuple), name
    return value


def _prompt(row: Row) -> int:
    """Tokens before the first generated one."""
    where = np.flatnonzero(row.generated)
    return int(where[0]) if len(where) else len(row.ids)
