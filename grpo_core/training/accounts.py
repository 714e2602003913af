"""What the ledger and the metrics say about decisions: pure functions from plans and results to rows and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_core.schedule.admission import Admission
from grpo_core.training.batch import Row
from grpo_core.training.feed import BufferedGroup
from grpo_core.training.measures import (
    Measures,
    composition_measures,
    lag_measures,
    length_measures,
    mean,
    waste_measures,
    weight_measures,
)
from grpo_core.training.rollout_measures import cost_measures, rollout_measures
from grpo_core.training.step import StepPlan, StepResult
from storage.ledger import DROPPED, RETURNED, TRAINED

NO_LAGS = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Decisions:
    """Groups dropped and returned, not yet in the ledger. `since`: when the first of them was decided."""

    dropped: tuple[tuple[BufferedGroup, str], ...] = ()
    returned: tuple[tuple[BufferedGroup, str], ...] = ()
    since: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.dropped or self.returned)

    def with_admission(self, admission: Admission, groups: Mapping[int, BufferedGroup], *, at: float) -> Decisions:
        dropped = tuple((groups[ordinal], reason) for ordinal, reason in admission.dropped.items())
        returned = tuple((groups[ordinal], reason) for ordinal, reason in admission.returned.items())
        return Decisions(self.dropped + dropped, self.returned + returned, self.since if self else at)

    def due(self, now: float, flush_seconds: float) -> bool:
        """Whether the oldest decision has waited long enough."""
        return bool(self) and now - self.since >= flush_seconds

    def groups(self) -> list[BufferedGroup]:
        return [group for group, _ in (*self.dropped, *self.returned)]

    def returned_ordinals(self) -> list[int]:
        return [group.ordinal for group, _ in self.returned]

    def dropped_by_reason(self) -> dict[str, list[int]]:
        reasons: dict[str, list[int]] = {}
        for group, reason in self.dropped:
            reasons.setdefault(reason, []).append(group.ordinal)
        return reasons

    def rows(self) -> list[dict[str, Any]]:
        return [
            {**_origin(group), "state": state, "reason": reason}
            for state, decided in ((DROPPED, self.dropped), (RETURNED, self.returned))
            for group, reason in decided
        ]


def unfinished_rows(ordinals: Iterable[int], groups: Mapping[int, BufferedGroup], reason: str) -> list[dict[str, Any]]:
    """Rows that drop these ordinals for `reason`, whether or not their groups have arrived."""
    return [
        {
            **(_origin(groups[ordinal]) if ordinal in groups else {"ordinal": ordinal}),
            "state": DROPPED,
            "reason": reason,
        }
        for ordinal in ordinals
    ]


@dataclass(frozen=True, slots=True)
class StepAccount:
    """Ledger rows of a step, its trained tokens by lag, and what it measured, by name; a ratio is a pair."""

    rows: list[dict[str, Any]]
    lag_tokens: dict[int, int]
    measures: Measures


def step_rows(
    plan: StepPlan,
    groups: Sequence[BufferedGroup],
    rows: Sequence[Row],
    result: StepResult,
    *,
    version: int,
    logprobs: bool,
    given_up: Decisions,
    token_budget: int,
    taken_at: float,
) -> StepAccount:
    """The account of one step. `rows` are those of plan.places, group after group, then fillers, which count nowhere;
    `version` is the training version, `given_up` what was decided about other groups since the step before; the groups
    were taken for it `taken_at`, in Unix seconds."""
    ledger, lags, first = [], [], 0
    for group in groups:
        members = range(first, first + len(group.rows))
        first += len(group.rows)
        may = plan.trained or [True] * len(plan.places)
        group_lags = np.concatenate(
            [_lags(rows[index], version, plan.oldest_version) if may[index] else NO_LAGS for index in members]
        )
        generated = sum(int(rows[index].generated.sum()) for index in members)
        by_rollout = {rollout: plan.advantages[index] for rollout, index in zip(group.rollouts, members, strict=True)}
        lags.append(group_lags)
        ledger.append(
            {
                **_origin(group),
                "state": TRAINED,
                "version_min": group.oldest_version,
                "version_max": group.newest_version,
                "lag_mean": float(group_lags.mean()) if len(group_lags) else None,
                "lag_max": int(group_lags.max()) if len(group_lags) else None,
                "reward_mean": _mean(group.rewards),
                "rewards": list(group.rewards),
                "advantages": [by_rollout.get(rollout, 0.0) for rollout in range(len(group.rewards))],
                "tokens_generated": generated,
                "tokens_trained": len(group_lags),
                "tokens_masked": generated - len(group_lags),
                "trainer_logprobs": [result.logprobs[index].tolist() for index in members if index in result.logprobs]
                if logprobs
                else None,
            }
        )
    all_lags = np.concatenate(lags)
    values, counts = np.unique(all_lags, return_counts=True)
    measures = _measures(plan, groups, rows, all_lags, result, given_up, token_budget, taken_at)
    return StepAccount(ledger, {int(v): int(c) for v, c in zip(values, counts, strict=True)}, measures)


def _measures(
    plan: StepPlan,
    groups: Sequence[BufferedGroup],
    rows: Sequence[Row],
    lags: np.ndarray,
    result: StepResult,
    given_up: Decisions,
    token_budget: int,
    taken_at: float,
) -> Measures:
    generated = sum(int(row.generated.sum()) for row in rows)
    rewards = _known(groups)
    return {
        **result.pairs,
        **result.extremes,
        **weight_measures(result.pairs),
        **length_measures(groups, rows[: sum(len(group.rows) for group in groups)], len(lags)),
        **rollout_measures(groups, taken_at=taken_at),
        **cost_measures([*groups, *given_up.groups()]),
        **composition_measures(plan, groups, rows, result, trained=len(lags), token_budget=token_budget),
        **lag_measures(lags),
        **waste_measures(
            groups, given_up.dropped, given_up.returned, generated_tokens=generated, trained_tokens=len(lags)
        ),
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "reward_mean_decided": mean([*rewards, *_known([group for group, _ in given_up.dropped])]),
        "masked_token_share": (float(generated - len(lags)), float(generated)),
    }


def _lags(row: Row, version: int, oldest: int) -> np.ndarray:
    """Lag of each trained token of a row."""
    return version - row.versions()[row.fresh(oldest)]


def _known(groups: Sequence[BufferedGroup]) -> list[float]:
    return [reward for group in groups for reward in group.rewards if not np.isnan(reward)]


def _mean(rewards: Sequence[float]) -> float | None:
    known = [reward for reward in rewards if not np.isnan(reward)]
    return float(np.mean(known)) if known else None


def _origin(group: BufferedGroup) -> dict[str, Any]:
    return {
        "ordinal": group.ordinal,
        "lease_attempt": group.part.attempt,
        "lease": group.part.lease,
        "part": group.part.part,
        "dataset_index": group.dataset_index,
        "epoch": group.epoch,
    }
