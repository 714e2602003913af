"""The policy-gradient objective on flat vectors: one value per token of a micro-batch of concatenated sequences.

Per trained token, with r the probability ratio current/old, A the advantage and w the importance weight old/behaviour:

    w · surrogate(r, A) + beta · KL(current ‖ reference) - entropy_coefficient · entropy

    grpo, dapo, dr_grpo, bnpo   max(-A r, -A clip(r))         token ratio (PPO, Schulman et al. 2017)
    gspo                        the same                      r = exp(mean log-ratio of a sequence) (Zheng et al. 2025)
    cispo                       -A · stop(clip(r)) · log π    (MiniMax 2025)
    reinforce                   -A · log π

    grpo, gspo                  mean over sequences of the mean over their tokens
    dapo, bnpo, cispo, reinforce   mean over tokens
    dr_grpo                     sum over tokens / (sequences · longest completion allowed) (Liu et al. 2025)

Invariants: denominators are those of the whole optimizer step, so any split of whole sequences into micro-batches and
ranks sums to the same value and gradient (bnpo, which elsewhere divides by the micro-batch, therefore equals dapo).
Masked positions are replaced before anything is computed; NaN or ±inf there change neither value nor gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from grpo_core.objective.diagnostics import Metrics, k3, masked_sum, mismatch

# exp(20) ≈ 5·10⁸ keeps ratio, gradient and their sums finite in float32; clipping has long decided by then.
LOG_RATIO_LIMIT = 20.0
SEQUENCE_MEAN = ("grpo", "gspo")
KNOWN = {
    "loss_type": ("grpo", "dapo", "dr_grpo", "bnpo", "gspo", "cispo", "reinforce"),
    "kl_type": ("k1", "k2", "k3"),
    "importance_correction": ("none", "token", "sequence"),
    "importance_mode": ("truncate", "band", "mask"),
}


class ObjectiveError(ValueError):
    """Inputs or settings from which no loss can be computed."""


class ObjectiveSettings(Protocol):
    """What the loss reads from the run config.

    `loss_type`: see the table above. Ratios are clipped to [1 - epsilon, 1 + epsilon_high] (None: epsilon).
    `dual_clip`: largest loss per unit of negative advantage (Ye et al. 2020), above 1; None: unbounded.
    `kl_type`: k1, k2 or k3; its log-ratio is clamped to ±`kl_input_clamp`, its value to ±`kl_output_clamp`.
    `importance_correction`: none, token or sequence. `importance_mode`: truncate clamps weights to
    [importance_floor or 0, importance_cap] (TIS); band zeroes those outside (IcePop); mask zeroes the sequences whose
    geometric mean weight lies outside. `force_on_policy_ratio`: take the current policy for the old one.
    """

    @property
    def loss_type(self) -> str: ...
    @property
    def epsilon(self) -> float: ...
    @property
    def epsilon_high(self) -> float | None: ...
    @property
    def dual_clip(self) -> float | None: ...
    @property
    def beta(self) -> float: ...
    @property
    def kl_type(self) -> str: ...
    @property
    def kl_input_clamp(self) -> float: ...
    @property
    def kl_output_clamp(self) -> float: ...
    @property
    def entropy_coefficient(self) -> float: ...
    @property
    def importance_correction(self) -> str: ...
    @property
    def importance_mode(self) -> str: ...
    @property
    def importance_cap(self) -> float: ...
    @property
    def importance_floor(self) -> float | None: ...
    @property
    def force_on_policy_ratio(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Denominators:
    """What the sums of a whole optimizer step, all ranks and micro-batches, are divided by.

    `tokens`: trained tokens; `sequences`: sequences with at least one; `constant`: for dr_grpo, the sequences times the
    longest completion allowed.
    """

    tokens: float
    sequences: float
    constant: float = 0.0


@dataclass(frozen=True, slots=True)
class _Segments:
    """Which sequence each token belongs to. `lengths`: trained tokens per sequence."""

    index: Tensor
    trained: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, mask: Tensor, sequence_ids: Tensor) -> _Segments:
        trained = mask != 0
        ids, index = torch.unique(sequence_ids, return_inverse=True)
        lengths = torch.zeros(len(ids), dtype=torch.int64, device=mask.device).index_add_(0, index, trained.long())
        return cls(index, trained, lengths)

    def sums(self, values: Tensor) -> Tensor:
        zeros = torch.zeros(len(self.lengths), dtype=values.dtype, device=values.device)
        return zeros.index_add(0, self.index, values)

    def means(self, values: Tensor) -> Tensor:
        return self.sums(values) / self.lengths.clamp(min=1)

    def spread(self, values: Tensor) -> Tensor:
        return torch.where(self.trained, values[self.index], 0.0)


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
    denominators: Denominators | None = None,
) -> tuple[Tensor, Metrics]:
    """Return the loss of these tokens, to be summed over the micro-batches and ranks of a step, and its metrics.

    All tensors are flat [tokens]; log-probs and entropy in nats. `logprobs` and `entropy` carry the gradient.
    `old_logprobs` may be None with `force_on_policy_ratio`. `denominators` None: those of this call, which dr_grpo
    does not have. Metrics are detached and map name → (numerator, denominator); `importance_weight` squared over
    `importance_weight_squared` is the effective sample size as a share. Raises ObjectiveError for tensors of different
    shapes, a missing input or an unknown setting.
    """
    _check_settings(config, denominators)
    if config.force_on_policy_ratio:
        old_logprobs = logprobs.detach()
    named = {
        "logprobs": logprobs,
        "old_logprobs": old_logprobs,
        "behaviour_logprobs": behaviour_logprobs,
        "advantages": advantages,
        "mask": mask,
        "sequence_ids": sequence_ids,
    }
    optional = {"reference_logprobs": reference_logprobs, "entropy": entropy}
    _check_inputs(named, optional, logprobs.shape, config)
    segments = _Segments.of(mask, sequence_ids)
    inputs = _clean(named | optional, segments.trained)
    current, advantage = inputs["logprobs"], inputs["advantages"].detach()
    old, behaviour = inputs["old_logprobs"].detach(), inputs["behaviour_logprobs"].detach()

    ratio = _ratio(current, old, segments, config)
    terms = _surrogate(ratio, current, advantage, config)
    metrics = _ratio_metrics(ratio, current, old, advantage, segments, config)
    metrics |= mismatch(current, old, behaviour, mask)
    if config.importance_correction != "none":
        raw, weights = _importance_weights(old, behaviour, segments, config)
        terms = weights * terms
        metrics["importance_weight"] = masked_sum(weights, segments.trained)
        metrics["importance_weight_squared"] = masked_sum(weights.square(), segments.trained)
        metrics["importance_clipped"] = masked_sum((weights != raw).to(raw.dtype), segments.trained)
    if reference_logprobs is not None:
        kl = _kl_to_reference(current, inputs["reference_logprobs"].detach(), config)
        terms = terms + config.beta * kl
        metrics["kl_reference"] = masked_sum(kl, segments.trained)
    if entropy is not None:
        terms = terms - config.entropy_coefficient * inputs["entropy"]
        metrics["entropy"] = masked_sum(inputs["entropy"], segments.trained)
    loss, share = _reduce(terms, segments, config, denominators)
    return loss, metrics | {"loss": (loss.detach(), share)}


def _clean(inputs: dict[str, Tensor | None], trained: Tensor) -> dict[str, Tensor]:
    """The given floating-point inputs in the working precision, with 0 wherever a token is not trained."""
    given = {name: values for name, values in inputs.items() if values is not None}
    dtype = torch.float64 if given["logprobs"].dtype == torch.float64 else torch.float32
    return {
        name: torch.where(trained, values.to(dtype), 0.0)
        for name, values in given.items()
        if name not in ("mask", "sequence_ids")
    }


def _ratio(current: Tensor, old: Tensor, segments: _Segments, config: ObjectiveSettings) -> Tensor:
    """Probability ratio current/old per token; for gspo the geometric mean over each sequence, on all its tokens."""
    log_ratio = current - old
    if config.loss_type == "gspo":
        log_ratio = segments.spread(segments.means(log_ratio))
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _clip_bounds(config: ObjectiveSettings) -> tuple[float, float]:
    return 1 - config.epsilon, 1 + (config.epsilon if config.epsilon_high is None else config.epsilon_high)


def _surrogate(ratio: Tensor, current: Tensor, advantage: Tensor, config: ObjectiveSettings) -> Tensor:
    """The policy-gradient term per token, to be minimised."""
    if config.loss_type == "reinforce":
        return -advantage * current
    clipped = ratio.clamp(*_clip_bounds(config))
    if config.loss_type == "cispo":
        return -advantage * clipped.detach() * current
    terms = torch.maximum(-advantage * ratio, -advantage * clipped)
    if config.dual_clip is not None:
        terms = torch.where(advantage < 0, torch.minimum(terms, -advantage * config.dual_clip), terms)
    return terms


def _importance_weights(
    old: Tensor, behaviour: Tensor, segments: _Segments, config: ObjectiveSettings
) -> tuple[Tensor, Tensor]:
    """(weights as the probabilities give them, weights as used). What is not finite becomes 0 before limits apply."""
    log_weight = old - behaviour
    if config.importance_correction == "sequence":
        raw = segments.spread(segments.sums(log_weight)).exp()
    else:
        raw = log_weight.exp()
    floor, cap = config.importance_floor or 0.0, config.importance_cap
    weights = torch.where(torch.isfinite(raw), raw, 0.0)
    if config.importance_mode == "truncate":
        return raw, weights.clamp(floor, cap)
    judged = raw if config.importance_mode == "band" else segments.spread(segments.means(log_weight)).exp()
    return raw, torch.where((judged >= floor) & (judged <= cap), weights, 0.0)


def _kl_to_reference(current: Tensor, reference: Tensor, config: ObjectiveSettings) -> Tensor:
    """KL(current ‖ reference) per token, at samples of the current policy.

    The estimate is multiplied by exp(log π - stop(log π)), whose value is 1 and whose gradient is the score function:
    without it the gradient of the estimate is not that of the KL. A clamped log-ratio carries no gradient.
    """
    log_ratio = reference - current
    limited = log_ratio.clamp(-config.kl_input_clamp, config.kl_input_clamp)
    estimate = {"k1": lambda: -limited, "k2": lambda: limited.square() / 2, "k3": lambda: k3(limited)}[config.kl_type]()
    score = torch.where(log_ratio == limited, current, current.detach())
    estimate = estimate * (score - current.detach()).exp()
    return estimate.clamp(-config.kl_output_clamp, config.kl_output_clamp)


def _ratio_metrics(
    ratio: Tensor, current: Tensor, old: Tensor, advantage: Tensor, segments: _Segments, config: ObjectiveSettings
) -> Metrics:
    """Ratio, k3 estimate of KL(old ‖ current), and the shares of tokens whose ratio the clip holds."""
    lower, upper = _clip_bounds(config)
    low, high = ratio < lower, ratio > upper
    if config.loss_type == "reinforce":
        low, high = torch.zeros_like(low), torch.zeros_like(high)
    elif config.loss_type != "cispo":
        low, high = low & (advantage < 0), high & (advantage > 0)
    figures = {
        "ratio": ratio,
        "kl": k3(current - old),
        "clip_ratio/low": low.to(ratio.dtype),
        "clip_ratio/high": high.to(ratio.dtype),
        "clip_ratio/region": (low | high).to(ratio.dtype),
    }
    return {name: masked_sum(values, segments.trained) for name, values in figures.items()}


def _reduce(
    terms: Tensor, segments: _Segments, config: ObjectiveSettings, denominators: Denominators | None
) -> tuple[Tensor, Tensor]:
    """(Σ of the terms over the step's denominator, share of the step that this call holds)."""
    tokens, sequences = segments.trained.sum(), (segments.lengths > 0).sum()
    if config.loss_type in SEQUENCE_MEAN:
        step_sequences = sequences if denominators is None else denominators.sequences
        return segments.means(terms).sum() / _positive(step_sequences), sequences / _positive(step_sequences)
    if config.loss_type == "dr_grpo" and denominators is not None:
        return terms.sum() / _positive(denominators.constant), sequences / _positive(denominators.sequences)
    step_tokens = tokens if denominators is None else denominators.tokens
    return terms.sum() / _positive(step_tokens), tokens / _positive(step_tokens)


def _positive(denominator: Tensor | float) -> Tensor | float:
    """1 for a step without trained tokens, whose numerator is 0."""
    return denominator.clamp(min=1) if isinstance(denominator, Tensor) else max(denominator, 1.0)


def _check_settings(config: ObjectiveSettings, denominators: Denominators | None) -> None:
    for name, known in KNOWN.items():
        if getattr(config, name) not in known:
            raise ObjectiveError(f"{name} is {getattr(config, name)!r}: choose one of {', '.join(known)}")
    if config.loss_type == "dr_grpo" and (denominators is None or denominators.constant <= 0):
        raise ObjectiveError(
            "dr_grpo divides by the sequences of the step times the longest completion allowed: "
            "pass denominators with a positive constant"
        )


def _check_inputs(
    named: dict[str, Tensor | None], optional: dict[str, Tensor | None], shape: torch.Size, config: ObjectiveSettings
) -> None:
    missing = [name for name, values in named.items() if values is None]
    missing += ["reference_logprobs"] if config.beta and optional["reference_logprobs"] is None else []
    missing += ["entropy"] if config.entropy_coefficient and optional["entropy"] is None else []
    if missing:
        raise ObjectiveError(f"the objective needs {missing[0]}, which is None: pass it or change the settings")
    for name, values in (named | optional).items():
        if values is not None and (values.dim() != 1 or values.shape != shape):
            raise ObjectiveError(
                f"{name} has the shape {list(values.shape)} but logprobs has {list(shape)}: "
                "both must be flat with one value per token"
            )
