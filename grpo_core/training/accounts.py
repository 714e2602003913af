"""What the ledger and the metrics say about decisions: pure functions from plans and results to rows and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_core.schedule.admission import Admission
from grpo_core.training.batch import Row
from grpo_core.training.feed import BufferedGroup
from grpo_core.training.step import StepPlan, StepResult

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
            for state, decided in (("dropped", self.dropped), ("returned", self.returned))
            for group, reason in decided
        ]


def unfinished_rows(ordinals: Iterable[int], groups: Mapping[int, BufferedGroup], reason: str) -> list[dict[str, Any]]:
    """Rows that drop these ordinals for `reason`, whether or not their groups have arrived."""
    return [
        {
            **(_origin(groups[ordinal]) if ordinal in groups else {"ordinal": ordinal}),
            "state": "dropped",
            "reason": reason,
        }
        for ordinal in ordinals
    ]


@dataclass(frozen=True, slots=True)
class StepAccount:
    """Ledger rows of a step, its trained tokens by lag, and its metrics by name."""

    rows: list[dict[str, Any]]
    lag_tokens: dict[int, int]
    metrics: dict[str, float]


def step_rows(
    plan: StepPlan,
    groups: Sequence[BufferedGroup],
    rows: Sequence[Row],
    result: StepResult,
    *,
    version: int,
    logprobs: bool,
) -> StepAccount:
    """The account of one step. `rows` are those of plan.places, group after group, then fillers, which count nowhere;
    `version` is the training version."""
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
                "state": "trained",
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
    metrics = _metrics(groups, rows[:first], all_lags, result)
    return StepAccount(ledger, {int(v): int(c) for v, c in zip(values, counts, strict=True)}, metrics)


def _metrics(
    groups: Sequence[BufferedGroup], rows: Sequence[Row], lags: np.ndarray, result: StepResult
) -> dict[str, float]:
    rewards = np.array([group.rewards for group in groups], dtype=np.float64)
    generated = np.array([int(row.generated.sum()) for row in rows])
    spread = np.nanmax(rewards, axis=1) != np.nanmin(rewards, axis=1)
    # masked_sum pairs of the objective are means per trained token, except where the denominator says otherwise.
    ratios = {name: numerator / denominator for name, (numerator, denominator) in result.pairs.items() if denominator}
    return {
        **ratios,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "step_seconds": result.seconds,
        "reward_mean": float(np.nanmean(rewards)),
        "reward_std": float(np.nanmean(np.nanstd(rewards, axis=1))),
        "zero_variance_share": float(1.0 - spread.mean()),
        "completion_tokens_mean": float(generated.mean()),
        "completion_tokens_max": float(generated.max()),
        "lag_mean": float(lags.mean()) if len(lags) else 0.0,
        "lag_max": float(lags.max()) if len(lags) else 0.0,
        "trained_tokens": float(len(lags)),
        "masked_token_share": float(1.0 - len(lags) / max(1, generated.sum())),
    }


def _lags(row: Row, version: int, oldest: int) -> np.ndarray:
    """Lag of each trained token of a row."""
    parts = [
        np.full(int(row.generated[span.start : span.end].sum()), version - span.version)
        for span in row.spans
        if span.version >= oldest
    ]
    return np.concatenate(parts) if parts else NO_LAGS


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
