"""How far the engine that sampled and the trainer that learns disagree about the same tokens.

Contract: flat vectors [tokens] in nats, one value per trained token; each result is (Σ over these tokens, number of
them), detached, so that sums over micro-batches and ranks stay exact. With x = old - behaviour, where old is the
trainer at the start of the step and behaviour the engine:

    token_mult_prob_error       mean exp|x|             1 when they agree; a factor between probabilities
    gen_kl_error                mean (eˣ - 1 - x)       k3 estimate of KL(behaviour ‖ old)
    policy_kl_error             mean (e⁻ˣ - 1 + x)      the same with the roles exchanged
    js_divergence_error         half the sum of both k3 terms, each against the log of the average probability
    sampling_importance_ratio   mean eˣ
    approx_entropy              -mean (e^(current - behaviour) · current)

Four of them come from expm1(x), which keeps every digit near 0; x is clamped to ±LOG_RATIO_LIMIT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from grpo_core.metrics import extreme_sign
from grpo_core.objective.segments import Segments

Number = Tensor | float
Metrics = dict[str, tuple[Number, Number]]
# exp(20) ≈ 5·10⁸ keeps ratios, their inverses, gradients and sums finite in float32; clipping has long decided by then.
LOG_RATIO_LIMIT = 20.0
RATIO_EXTREMES = (
    "ratio_min",
    "ratio_max",
    "ratio_clamped_min",
    "ratio_clamped_max",
    "clip_ratio/low_min",
    "clip_ratio/high_max",
)


@torch.no_grad()
def mismatch(current: Tensor, old: Tensor, behaviour: Tensor) -> Metrics:
    """The six figures above, of the log-probs of trained tokens."""
    x = (old - behaviour).clamp_(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio, up = x.exp(), torch.expm1(x)
    down = up / ratio  # 1 - e⁻ˣ
    sums = {
        "sampling_importance_ratio": ratio.sum(),
        "gen_kl_error": (up - x).sum(),
        "policy_kl_error": (x - down).sum(),
        # log cosh(x/2), which is what half the sum of both k3 terms comes to.
        "js_divergence_error": (up * down).div_(4).log1p_().sum() / 2,
        "token_mult_prob_error": torch.maximum(up, down.neg_()).add_(1).sum(),
        "approx_entropy": -(current - behaviour).exp_().mul_(current).sum(),
    }
    return {name: (value, len(x)) for name, value in sums.items()}


@torch.no_grad()
def ratio_extremes(ratio: Tensor, limited: Tensor, side: Tensor, segments: Segments) -> dict[str, Tensor]:
    """RATIO_EXTREMES of trained tokens: of their ratios, of the ratios as used, and of the shares of a sequence that
    are held from below (`side` positive) and from above (negative). Empty when there is no token."""
    if not segments.tokens:
        return {}
    low, high = (segments.means(indicator(compare, side, 0.0)) for compare in (torch.gt, torch.lt))
    values = (ratio.min(), ratio.max(), limited.min(), limited.max(), low.min(), high.max())
    return dict(zip(RATIO_EXTREMES, values, strict=True))


def indicator(compare: Callable[..., Tensor], left: Tensor, right: Tensor | float) -> Tensor:
    """1.0 where the comparison, such as torch.lt, holds and 0.0 elsewhere, in the dtype and shape of `left`.

    On a CPU a comparison that writes floats is vectorised; one that writes bools takes five times as long.
    """
    return compare(left, right, out=torch.empty_like(left))


def merge_sums(held: Metrics, more: Mapping[str, tuple[Number, Number]]) -> None:
    """Let `held` be the sums of both."""
    for name, (top, bottom) in more.items():
        numerator, denominator = held.get(name, (0.0, 0.0))
        held[name] = (numerator + top, denominator + bottom)


def merge_extremes(held: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    """Let `held` be the extremes of both, each in the direction that the registry says."""
    for name, value in more.items():
        sign = extreme_sign(name)
        held[name] = value if name not in held else sign * torch.maximum(sign * held[name], sign * value)
