"""From the rewards of a step to the advantage of each rollout: everything that is decided before a forward pass.

    scale rewards → overlong penalty, discount of truncated ones → compare within the group → whiten over the step →
    clip → take the gradient away from those that must have none

Contract: arrays are [groups, members]; a pure function of facts that the shards hold and of which tokens the window
lets be trained. A rollout without a score, without such a token, and with overlong_filtering a truncated one, has the
advantage 0 and `trained` false: the trainer leaves its tokens out of mask and denominators alike. A truncated rollout
stays in the baseline of its siblings: it is a fact about the prompt that the policy ran out of tokens on it, and a
baseline without it would call every finished rollout average. So does one whose tokens are all too old. Whitening is
over what is trained, for it is the mean and the spread of the gradient's weights that it sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from grpo_core.objective.advantages import AdvantageError, Floats, group_advantages, source_advantages, whitened
from grpo_core.objective.shaping import discounted, overlong_penalty, scaled

Mask = npt.NDArray[np.bool_]
Pairs = dict[str, tuple[float, float]]


class ScalingSettings(Protocol):
    """Rewards are clamped to [source_min, source_max] and mapped onto [target_min, target_max]."""

    @property
    def source_min(self) -> float: ...
    @property
    def source_max(self) -> float: ...
    @property
    def target_min(self) -> float: ...
    @property
    def target_max(self) -> float: ...


class ShapingSettings(Protocol):
    """See overlong_penalty (buffer of 0 tokens: none) and discounted."""

    @property
    def overlong_buffer_length(self) -> int: ...
    @property
    def overlong_buffer_penalty(self) -> float: ...
    @property
    def max_response_length(self) -> int: ...
    @property
    def truncated_coefficient(self) -> float: ...


class CreditSettings(Protocol):
    """What is read of the run config's section `grpo`."""

    @property
    def advantage_baseline(self) -> Literal["mean", "leave_one_out", "none"]: ...
    @property
    def advantage_scale(self) -> Literal["group", "batch", "none"]: ...
    @property
    def advantage_ddof(self) -> int | None: ...
    @property
    def advantage_per_source(self) -> bool: ...
    @property
    def advantage_whitening(self) -> Literal["none", "rollouts", "tokens"]: ...
    @property
    def advantage_clip_low(self) -> float | None: ...
    @property
    def advantage_clip_high(self) -> float | None: ...
    @property
    def overlong_filtering(self) -> bool: ...
    @property
    def reward_scaling(self) -> ScalingSettings | None: ...
    @property
    def reward_shaping(self) -> ShapingSettings | None: ...


@dataclass(frozen=True, slots=True)
class Credit:
    """`advantages` and bool `trained`, `rewarded` (a reward above 0, as the shard has it): [groups, members].
    `metrics`: name → (numerator, denominator)."""

    advantages: Floats
    trained: Mask
    rewarded: Mask
    metrics: Pairs


def step_advantages(
    rewards: npt.ArrayLike,
    config: CreditSettings,
    *,
    lengths: npt.ArrayLike,
    truncated: npt.ArrayLike,
    trainable: npt.ArrayLike | None = None,
    components: Mapping[str, npt.ArrayLike] | None = None,
    weights: Mapping[str, float] | None = None,
) -> Credit:
    """The credit of every rollout of a step.

    `rewards` [groups, members], weighted sums with NaN where no source could score; of the same shape `lengths`,
    generated tokens, 0 where there is no such rollout; `truncated`, whether the tokens ran out; and `trainable`, how
    many of the tokens are within the window (None: all). `components` maps source → raw rewards of that shape, and
    `weights` source → factor; both are needed with advantage_per_source. Raises AdvantageError.
    """
    raw = np.asarray(rewards, dtype=np.float64)
    tokens, cut = np.asarray(lengths, dtype=np.float64), np.asarray(truncated, dtype=bool)
    fresh = tokens if trainable is None else np.asarray(trainable, dtype=np.float64)
    for name, values in {"lengths": tokens, "truncated": cut, "trainable": fresh}.items():
        if values.shape != raw.shape:
            raise AdvantageError(f"{name} has the shape {values.shape} but the rewards {raw.shape}: align them")
    scorable = ~np.isnan(raw)
    trained = scorable & (fresh > 0) & ~(cut & config.overlong_filtering)
    shaped = _shaped(raw, tokens, cut, config)
    advantages = _compared(raw, shaped, tokens, cut, config, components, weights)
    if config.advantage_whitening != "none":
        advantages = whitened(advantages, np.where(trained, fresh if config.advantage_whitening == "tokens" else 1, 0))
    clipped = np.clip(
        advantages,
        -np.inf if config.advantage_clip_low is None else config.advantage_clip_low,
        np.inf if config.advantage_clip_high is None else config.advantage_clip_high,
    )
    present = tokens > 0
    metrics = _reward_metrics(raw, shaped, cut, present, components or {})
    metrics |= _advantage_metrics(advantages, clipped, trained, present)
    return Credit(np.where(trained, clipped, 0.0), trained, scorable & (raw > 0), metrics)


def any_advantage(
    rewards: Sequence[float],
    config: CreditSettings,
    *,
    lengths: Sequence[int],
    truncated: Sequence[bool],
    components: Mapping[str, Sequence[float]],
    weights: Mapping[str, float],
) -> bool:
    """Whether any rollout of one group has an advantage of its own, before it is whitened with those of the step; the
    arguments are those of step_advantages for this group alone."""
    raw = np.asarray([rewards], dtype=np.float64)
    tokens, cut = np.asarray([lengths], dtype=np.float64), np.asarray([truncated], dtype=bool)
    sources = {name: [values] for name, values in components.items()}
    advantages = _compared(raw, _shaped(raw, tokens, cut, config), tokens, cut, config, sources, weights)
    return bool((advantages[~cut] if config.overlong_filtering else advantages).any())


def _shaped(rewards: Floats, lengths: Floats, truncated: Mask, config: CreditSettings) -> Floats:
    """Scaled, discounted and penalised."""
    shaped = _discounted(_scaled(rewards, config), truncated, config)
    return shaped + _penalty(lengths, config)


def _scaled(rewards: Floats, config: CreditSettings) -> Floats:
    scaling = config.reward_scaling
    if scaling is None:
        return rewards
    source, target = (scaling.source_min, scaling.source_max), (scaling.target_min, scaling.target_max)
    return scaled(rewards, source=source, target=target)


def _discounted(rewards: Floats, truncated: Mask, config: CreditSettings) -> Floats:
    shaping = config.reward_shaping
    return rewards if shaping is None else discounted(rewards, truncated, shaping.truncated_coefficient)


def _penalty(lengths: Floats, config: CreditSettings) -> Floats:
    shaping = config.reward_shaping
    if shaping is None or shaping.overlong_buffer_length == 0:
        return np.zeros_like(lengths)
    return overlong_penalty(
        lengths,
        longest=shaping.max_response_length,
        buffer=shaping.overlong_buffer_length,
        penalty=shaping.overlong_buffer_penalty,
    )


def _compared(
    raw: Floats,
    shaped: Floats,
    lengths: Floats,
    truncated: Mask,
    config: CreditSettings,
    components: Mapping[str, npt.ArrayLike] | None,
    weights: Mapping[str, float] | None,
) -> Floats:
    """Compared with the siblings: by the sum of the sources, or source by source, the penalty being one more."""
    baseline, scale, ddof = config.advantage_baseline, config.advantage_scale, config.advantage_ddof
    if not config.advantage_per_source:
        return group_advantages(shaped, baseline=baseline, scale=scale, ddof=ddof)
    if components is None or weights is None:
        raise AdvantageError(
            "advantage_per_source compares each source of reward by itself: pass components and weights"
        )
    sources: dict[str, npt.ArrayLike] = {
        name: _discounted(_scaled(np.asarray(values, dtype=np.float64), config), truncated, config)
        for name, values in components.items()
    }
    sources["overlong penalty"] = np.where(np.isnan(raw), np.nan, _penalty(lengths, config))
    return source_advantages(sources, {**weights, "overlong penalty": 1.0}, baseline=baseline, scale=scale, ddof=ddof)


def _reward_metrics(
    raw: Floats, shaped: Floats, truncated: Mask, present: Mask, components: Mapping[str, npt.ArrayLike]
) -> Pairs:
    scorable = ~np.isnan(raw)
    groups = [members[known] for members, known in zip(raw, scorable, strict=True) if known.any()]
    metrics = {
        "reward_mean": _mean_pair(raw, scorable),
        "reward_shaped": _mean_pair(shaped, scorable),
        "reward_std": (float(sum(group.std() for group in groups)), float(len(groups))),
        "zero_variance_share": (float(sum(group.min() == group.max() for group in groups)), float(len(groups))),
        "unscorable_rollouts": _mean_pair(~scorable, present),
        "truncated_rollouts": _mean_pair(truncated, present),
    }
    for name, values in components.items():
        component = np.asarray(values, dtype=np.float64)
        metrics[f"reward/{name}"] = _mean_pair(component, ~np.isnan(component))
    return metrics


def _advantage_metrics(advantages: Floats, clipped: Floats, trained: Mask, present: Mask) -> Pairs:
    return {
        "advantage": _mean_pair(clipped, trained),
        "advantage_magnitude": _mean_pair(np.abs(clipped), trained),
        "advantage_clipped": _mean_pair(clipped != advantages, trained),
        "trained_rollouts": _mean_pair(trained, present),
    }


def _mean_pair(values: Floats | Mask, which: Mask) -> tuple[float, float]:
    return float(values[which].sum()), float(which.sum())
