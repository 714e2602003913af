"""Which old policy the probability ratio refers to, and the weights that correct for the policy that sampled.

    π_behaviour  the engine's, at the version that sampled the token; its log-probs are in the shard
    π_proximal   the one the ratio current/proximal refers to and the clip keeps near (decoupled PPO, Hilton et al. 2022)
    π_current    the one that is trained

proximal_policy
    recomputed   the trainer's own policy at the start of the step
    behaviour    the engine's: plain PPO, whose ratio corrects for staleness by itself
    log_linear   log π = α log π_behaviour + (1 - α) log π_current with α = 1 / (lag + 1): where the start of the step
                 lies on the line of versions from the sampled one to the one that the step ends with (A-3PO, 2025).
                 No second forward pass; α = 1 for a fresh token

Importance weights w = proximal/behaviour are data, without a gradient. What is not finite becomes 0 before limits
apply. Level: one weight per token; per sequence, the product over its tokens; or geometric, their geometric mean. Mode:

    truncate   clamp to [importance_floor or 0, importance_cap] (TIS, Yao et al. 2025)
    band       0 outside the limits (IcePop, 2025)
    mask       0 for the sequences whose geometric mean weight lies outside the limits; others keep their weights
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_core.objective.diagnostics import Metrics, indicator
from grpo_core.objective.segments import Segments
from grpo_core.objective.settings import ObjectiveSettings


def proximal_logprobs(
    current: Tensor, old: Tensor | None, behaviour: Tensor, lags: Tensor | None, config: ObjectiveSettings
) -> Tensor:
    """Log-probs of the proximal policy, [tokens], without a gradient. `old` are those of the start of the step, `lags`
    the training version less that of each token; each may be None where the setting does not need it."""
    if config.force_on_policy_ratio:
        return current.detach()
    if config.proximal_policy == "behaviour":
        return behaviour
    if config.proximal_policy == "log_linear":
        assert lags is not None
        return torch.lerp(current.detach(), behaviour, 1 / (lags + 1))
    assert old is not None
    return old


def importance_weights(
    proximal: Tensor, behaviour: Tensor, segments: Segments, config: ObjectiveSettings
) -> tuple[Tensor, Tensor]:
    """(weights as the probabilities give them, weights as used), both [tokens]."""
    log_weight = proximal - behaviour
    raw = _level(log_weight, segments, config.importance_correction).exp()
    floor, cap = config.importance_floor or 0.0, config.importance_cap
    weights = raw.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    if config.importance_mode == "truncate":
        return raw, weights.clamp(floor, cap)
    judged = raw if config.importance_mode == "band" else _level(log_weight, segments, "geometric").exp()
    return raw, torch.where((judged >= floor) & (judged <= cap), weights, 0.0)


def _level(log_weight: Tensor, segments: Segments, level: str) -> Tensor:
    if level == "token":
        return log_weight
    return segments.spread(segments.sums(log_weight) if level == "sequence" else segments.means(log_weight))


def weight_metrics(raw: Tensor, weights: Tensor) -> Metrics:
    """The mean weight, its square (whose quotient is the effective sample size as a share) and the share limited."""
    return {
        "importance_weight": (weights.sum(), len(weights)),
        "importance_weight_squared": (weights.square().sum(), len(weights)),
        "importance_clipped": (indicator(torch.ne, weights, raw).sum(), len(weights)),
    }


def believed(trainer: Tensor, behaviour: Tensor, segments: Segments, threshold: float) -> tuple[Tensor, Metrics]:
    """Bool [sequences]: where trainer and engine agree, mean exp|Δ log-prob| at most `threshold`.

    The others must be left out before anything else is computed: a log-prob that is not a number would have a gradient
    that is not one either. Denominators stay those of the plan: such a sequence counts as one without a gradient.
    """
    error = segments.means((trainer - behaviour).abs().exp())
    # An error that is not a number is not believed either.
    kept = error <= threshold
    return kept, {
        "sequence_error": (error.sum(), len(error)),
        "sequence_error_masked": ((~kept).sum(), len(error)),
    }
