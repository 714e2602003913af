"""The policy-gradient objective on flat vectors: one value per token of a micro-batch of concatenated sequences.

Per trained token, with r the probability ratio current/proximal, A the advantage and w the importance weight
proximal/behaviour (importance.py), and the KL term of kl.py:

    w · surrogate(r, A) + beta · KL(current ‖ reference) - entropy_coefficient · entropy

    grpo, dapo, dr_grpo, bnpo   max(-A r, -A clip(r))         token ratio (PPO, Schulman et al. 2017)
    gspo                        the same                      r = exp(mean log-ratio of a sequence) (Zheng et al. 2025)
    cispo                       -A · stop(clip(r)) · log π    (MiniMax 2025)
    reinforce                   -A · log π

    grpo, gspo                  mean over sequences of the mean over their tokens
    dapo, bnpo, cispo, reinforce   mean over tokens
    dr_grpo                     sum over tokens / (sequences · tokens a rollout may have) (Liu et al. 2025)

`ratio_level` gives any of them the ratio of tokens or of sequences. Besides, positive_nll_weight times the mean over
the tokens of rewarded rollouts of -log π (VAPO).

Invariants: denominators are those of the whole optimizer step, so any split of whole sequences into micro-batches and
ranks sums to the same value and gradient (bnpo, which elsewhere divides by the micro-batch, therefore equals dapo).
Masked positions are left out before anything is computed; NaN or ±inf there change neither value nor gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_core.objective.blocks import Flat, Trained, sum_over_blocks
from grpo_core.objective.diagnostics import (
    LOG_RATIO_LIMIT,
    Metrics,
    indicator,
    merge_extremes,
    mismatch,
    ratio_extremes,
)
from grpo_core.objective.importance import believed, importance_weights, proximal_logprobs, weight_metrics
from grpo_core.objective.kl import k3, kl_penalised, kl_to_reference
from grpo_core.objective.segments import Segments
from grpo_core.objective.settings import (
    Denominators,
    ObjectiveError,
    ObjectiveSettings,
    check_settings,
    needs_old_policy,
)

__all__ = ["Denominators", "ObjectiveError", "ObjectiveSettings", "policy_loss"]

SEQUENCE_MEAN = ("grpo", "gspo")


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    config: ObjectiveSettings,
    *,
    reference_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    lags: Tensor | None = None,
    positive: Tensor | None = None,
    denominators: Denominators | None = None,
    extremes: dict[str, Tensor] | None = None,
) -> tuple[Tensor, Metrics]:
    """Return the loss of these tokens, to be summed over the micro-batches and ranks of a step, and its metrics.

    All tensors are flat [tokens]; log-probs and entropy in nats. `logprobs` and `entropy` carry the gradient.
    `old_logprobs`, the trainer's at the start of the step, may be None unless the proximal policy is recomputed;
    `lags` are needed where it is log-linear. `positive`: whether the token's rollout was rewarded. `denominators`
    None: those of this call, which dr_grpo does not have. Metrics are detached and map name → (numerator,
    denominator); `importance_weight` squared over `importance_weight_squared` is the effective sample size as a share.
    `extremes`, if given, takes up those of these tokens (diagnostics.RATIO_EXTREMES), which are no sums.
    Raises ObjectiveError for tensors of different shapes, a missing input or an unknown setting.
    """
    check_settings(config, denominators)
    given = {
        "logprobs": logprobs,
        "old_logprobs": old_logprobs,
        "behaviour_logprobs": behaviour_logprobs,
        "advantages": advantages,
        "mask": mask,
        "sequence_ids": sequence_ids,
        "reference_logprobs": reference_logprobs,
        "entropy": entropy,
        "lags": lags,
        "positive": positive,
    }
    _check_inputs(given, config)
    tensors = {name: values for name, values in given.items() if values is not None}
    flat = Flat.of(tensors, tensors.pop("mask"), tensors.pop("sequence_ids"))
    step = denominators or _denominators(flat)
    differentiable = ("logprobs",) if entropy is None else ("logprobs", "entropy")
    return sum_over_blocks(lambda block: _loss(block, config, step, extremes), flat, differentiable)


def _loss(
    block: Trained, config: ObjectiveSettings, denominators: Denominators, extremes: dict[str, Tensor] | None
) -> tuple[Tensor, Metrics]:
    """The loss of a few whole sequences, without those that are not believed, and its metrics."""
    current, behaviour = block.tensors["logprobs"].detach(), block.tensors["behaviour_logprobs"]
    trainer = block.tensors.get("old_logprobs", current)
    metrics = mismatch(current, trainer, behaviour)
    if config.sequence_error_threshold is not None:
        kept, errors = believed(trainer, behaviour, block.segments, config.sequence_error_threshold)
        block, metrics = block.only(kept), metrics | errors
    loss, more = _loss_of_believed(block, config, denominators, extremes)
    return loss, metrics | more


def _loss_of_believed(
    block: Trained, config: ObjectiveSettings, denominators: Denominators, extremes: dict[str, Tensor] | None
) -> tuple[Tensor, Metrics]:
    """Surrogate, corrections and the other terms."""
    inputs, segments = block
    current, behaviour, advantage = inputs["logprobs"], inputs["behaviour_logprobs"], inputs["advantages"]

    proximal = proximal_logprobs(current, inputs.get("old_logprobs"), behaviour, inputs.get("lags"), config)
    reference = inputs.get("reference_logprobs")
    if reference is not None and config.kl_placement == "reward":
        advantage = kl_penalised(advantage, proximal, reference, segments, config)
    log_ratio = current - proximal
    ratio = _ratio(log_ratio, segments, config)
    limited = _limited(ratio, advantage, config)
    # What the advantage does not move, nothing holds.
    side = torch.where(advantage == 0, 0.0, (limited - ratio.detach()).sign())
    held = side.abs()
    metrics = _ratio_metrics(ratio.detach(), limited, side, held, log_ratio.detach())
    if extremes is not None:
        merge_extremes(extremes, ratio_extremes(ratio.detach(), limited, side, segments))
    if config.importance_correction != "none":
        raw, weights = importance_weights(proximal, behaviour, segments, config)
        # The surrogate is linear in the advantage, which has no gradient, so that there this product costs one pass.
        advantage = advantage * weights
        metrics |= weight_metrics(raw, weights)
    terms = _surrogate(ratio, limited, held, current, advantage, config)
    if reference is not None:
        kl = kl_to_reference(current, reference, behaviour, config)
        metrics["kl_reference"] = (kl.detach().sum(), segments.tokens)
        if config.kl_placement == "loss":
            terms = terms + config.beta * kl
    if "entropy" in inputs:
        terms = terms - config.entropy_coefficient * inputs["entropy"]
        metrics["entropy"] = (inputs["entropy"].detach().sum(), segments.tokens)
    loss = _reduce(terms, segments, config, denominators)
    if config.positive_nll_weight:
        rewarded = inputs["positive"] != 0
        surprise = -torch.where(rewarded, current, 0.0).sum()
        metrics["positive_nll"] = (surprise.detach(), rewarded.sum())
        loss = loss + config.positive_nll_weight * surprise / max(denominators.positive_tokens, 1.0)
    return loss, metrics


def _ratio(log_ratio: Tensor, segments: Segments, config: ObjectiveSettings) -> Tensor:
    """Probability ratio current/proximal per token; of sequences, the geometric mean of each on all its tokens."""
    if (config.ratio_level or ("sequence" if config.loss_type == "gspo" else "token")) == "sequence":
        log_ratio = segments.spread(segments.means(log_ratio))
    return F.hardtanh(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@torch.no_grad()
def _limited(ratio: Tensor, advantage: Tensor, config: ObjectiveSettings) -> Tensor:
    """The ratio as the surrogate uses it. Clipping only ever takes an incentive away, so it holds the ratio from above
    where the advantage is positive and from below where it is negative: -A · limited = max(-A r, -A clip(r))."""
    lower, upper = 1 - config.epsilon, 1 + (config.epsilon if config.epsilon_high is None else config.epsilon_high)
    if config.loss_type == "reinforce":
        return ratio
    if config.loss_type == "cispo":
        return ratio.clamp(lower, upper)
    above, within = ratio.clamp(max=upper), ratio.clamp(lower, config.dual_clip)
    # Both are finite, so that their blend at weight 0 or 1 is one of them, and six times as fast as torch.where.
    return torch.lerp(above, within, indicator(torch.lt, advantage, 0.0))


def _surrogate(
    ratio: Tensor, limited: Tensor, held: Tensor, current: Tensor, advantage: Tensor, config: ObjectiveSettings
) -> Tensor:
    """The policy-gradient term per token, to be minimised. A ratio that is `held`, 0 or 1, has no gradient."""
    if config.loss_type == "reinforce":
        return -advantage * current
    if config.loss_type == "cispo":
        return -advantage * limited * current
    return -advantage * torch.lerp(ratio, limited, held)


def _ratio_metrics(ratio: Tensor, limited: Tensor, side: Tensor, held: Tensor, log_ratio: Tensor) -> Metrics:
    """Ratio, k3 estimate of KL(proximal ‖ current), and the shares of tokens whose ratio is held: from below, from
    above (for a negative advantage by dual_clip or cispo), or either."""
    tokens, region = len(ratio), held.sum()
    high = (region - side.sum()) / 2
    return {
        "ratio": (ratio.sum(), tokens),
        "ratio_clamped": (limited.sum(), tokens),
        "kl": (k3(log_ratio).sum(), tokens),
        "clip_ratio/low": (region - high, tokens),
        "clip_ratio/high": (high, tokens),
        "clip_ratio/region": (region, tokens),
    }


def _reduce(terms: Tensor, segments: Segments, config: ObjectiveSettings, denominators: Denominators) -> Tensor:
    """Σ of the terms over the step's denominator."""
    if config.loss_type in SEQUENCE_MEAN:
        return segments.means(terms).sum() / max(denominators.sequences, 1.0)
    if config.loss_type == "dr_grpo":
        return terms.sum() / max(denominators.constant, 1.0)
    return terms.sum() / max(denominators.tokens, 1.0)


def _denominators(flat: Flat) -> Denominators:
    """Those of a step that consists of these tokens alone."""
    tokens, sequences = flat.counts()
    positive = flat.tensors.get("positive")
    rewarded = 0 if positive is None else int(((positive != 0) & flat.mask).sum())
    return Denominators(tokens, sequences, positive_tokens=rewarded)


def _check_inputs(given: dict[str, Tensor | None], config: ObjectiveSettings) -> None:
    needed = {
        "old_logprobs": needs_old_policy(config),
        "reference_logprobs": bool(config.beta),
        "entropy": bool(config.entropy_coefficient),
        "lags": config.proximal_policy == "log_linear" and not config.force_on_policy_ratio,
        "positive": bool(config.positive_nll_weight),
    }
    for name in given:
        if given[name] is None and needed.get(name, name not in needed):
            raise ObjectiveError(f"the objective needs {name}, which is None: pass it or change the settings")
    shape = given["logprobs"].shape  # type: ignore[union-attr]
    for name, values in given.items():
        if values is not None and (values.dim() != 1 or values.shape != shape):
            raise ObjectiveError(
                f"{name} has the shape {list(values.shape)} but logprobs has {list(shape)}: "
                "both must be flat with one value per token"
            )
