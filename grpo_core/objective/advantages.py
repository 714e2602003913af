"""Group-relative advantages: how much better a rollout did than its siblings, and how much that counts in a step.

Contract: rewards in, advantages of the same shape out, NumPy float64. Members without a usable reward get 0 and touch
neither the baseline nor the spread. Statistics are two-pass, and a spread of exactly equal rewards is zero by
comparison of the rewards: the rounding residue of a computed deviation (10⁻¹⁷ for seven times 0.95) would otherwise
divide a plain difference into an advantage of a million.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class AdvantageError(ValueError):
    """Rewards of the wrong shape, or an infinite one."""


def group_advantages(
    rewards: npt.ArrayLike,
    *,
    baseline: Literal["mean", "leave_one_out", "none"] = "mean",
    scale: Literal["group", "batch", "none"] = "group",
    ddof: int | None = None,
    eps: float = 1e-6,
    mask: npt.ArrayLike | None = None,
) -> Floats:
    """(reward - baseline) / (spread + eps) for `rewards` of shape [groups, members].

    NaN marks an unscorable member, and so does a zero in `mask` (same shape). `baseline`: the mean of the group, of
    the other members (RLOO, Ahmadian et al. 2024), or 0. `scale`: the standard deviation of what the baseline is the
    mean of ("group", GRPO, Shao et al. 2024), of all scorable rewards ("batch"), or 1 ("none", Dr. GRPO, Liu et al.
    2025). `ddof` None: 1 for leave_one_out, 0 otherwise. Where the spread is zero or undefined the difference stays
    unscaled. Raises AdvantageError for another shape, an infinite reward or an unknown choice.
    """
    values = np.asarray(rewards).astype(np.float64)
    scorable = _scorable(values, mask)
    if baseline not in ("mean", "leave_one_out", "none") or scale not in ("group", "batch", "none"):
        raise AdvantageError(
            f"baseline {baseline!r} with scale {scale!r} is unknown: use mean, leave_one_out or none with group, batch "
            "or none"
        )
    freedom = ddof if ddof is not None else int(baseline == "leave_one_out")
    advantages = np.zeros_like(values)
    batch_spread = _spread(values[scorable][np.newaxis, :], freedom) if scale == "batch" else np.zeros(1)
    for group, members in enumerate(scorable):
        scored = values[group, members]
        if scored.size == 0:
            continue
        peers = _others(scored) if baseline == "leave_one_out" and scored.size > 1 else scored[np.newaxis, :]
        difference = scored if baseline == "none" else scored - _mean(peers)
        spread = _spread(peers, freedom) if scale == "group" else batch_spread
        advantages[group, members] = difference / np.where(spread > 0, spread + eps, 1.0)
    return advantages


def source_advantages(
    components: Mapping[str, npt.ArrayLike],
    weights: Mapping[str, float],
    *,
    baseline: Literal["mean", "leave_one_out", "none"] = "mean",
    scale: Literal["group", "batch", "none"] = "group",
    ddof: int | None = None,
) -> Floats:
    """Σ weight · group_advantages over the sources of reward, each compared within the group by itself, so that none is
    drowned by another of larger spread (GDPO, 2026). `components` maps source → [groups, members], NaN where it has no
    score: such a source counts nothing for that member. Raises AdvantageError for a source without a weight."""
    unweighted = sorted(components.keys() - weights.keys())
    if unweighted or not components:
        raise AdvantageError(
            f"the sources {sorted(components)} and the weights {sorted(weights)} do not match: give each source a weight"
        )
    return np.sum(
        [
            weights[name] * group_advantages(values, baseline=baseline, scale=scale, ddof=ddof)
            for name, values in components.items()
        ],
        axis=0,
    )


def whitened(advantages: Floats, counts: npt.ArrayLike, *, least: float = 1e-6) -> Floats:
    """(advantage - mean) / deviation over a whole step, where each entry counts `counts` times (same shape): once per
    rollout as in GDPO, or once per trained token as in REINFORCE++ (Hu 2025). Entries that count 0 times become 0.
    Equal advantages become 0. A deviation below `least`,
    which may be the rounding residue of a sum over sources, counts as that much."""
    times = np.asarray(counts, dtype=np.float64)
    counted = times > 0
    if not counted.any():
        return np.zeros_like(advantages)
    values, times = advantages[counted], times[counted]
    whole = np.zeros_like(advantages)
    if values.min() < values.max():
        difference = values - np.average(values, weights=times)
        whole[counted] = difference / max(np.sqrt(np.average(np.square(difference), weights=times)), least)
    return whole


def _scorable(values: Floats, mask: npt.ArrayLike | None) -> npt.NDArray[np.bool_]:
    if values.ndim != 2:
        raise AdvantageError(f"rewards have the shape {values.shape}: expected [groups, members]")
    scorable = ~np.isnan(values)
    if mask is not None:
        chosen = np.asarray(mask) != 0
        if chosen.shape != values.shape:
            raise AdvantageError(f"the mask has the shape {chosen.shape} but the rewards {values.shape}: align them")
        scorable &= chosen
    infinite = np.argwhere(scorable & np.isinf(values))
    if infinite.size:
        group, member = infinite[0]
        raise AdvantageError(
            f"member {member} of group {group} has the reward {values[group, member]}: use NaN for what has no score"
        )
    return scorable


def _others(scored: Floats) -> Floats:
    """Row i holds all values but the i-th: [members, members - 1]."""
    count = scored.size
    others: Floats = np.broadcast_to(scored, (count, count))[~np.eye(count, dtype=bool)].reshape(count, count - 1)
    return others


def _mean(rows: Floats) -> Floats:
    """Mean of each row; of equal values, that value exactly."""
    equal = rows.min(axis=1) == rows.max(axis=1)
    return np.where(equal, rows[:, 0], rows.mean(axis=1))


def _spread(rows: Floats, ddof: int) -> Floats:
    """Standard deviation of each row; 0 where all values are equal or too few."""
    freedom = rows.shape[1] - ddof
    if freedom <= 0:
        return np.zeros(rows.shape[0])
    squares = np.square(rows - rows.mean(axis=1, keepdims=True)).sum(axis=1)
    equal = rows.min(axis=1) == rows.max(axis=1)
    return np.where(equal, 0.0, np.sqrt(squares / freedom))
