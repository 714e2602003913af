"""KL divergence from a reference policy, estimated per token at samples (Schulman 2020).

With x = log reference/current:   k1: -x    k2: x²/2    k3: eˣ - 1 - x

kl_placement
    loss     beta times the estimate is added to the loss. The estimate is multiplied by κ = exp(log π - stop(log π)),
             whose value is 1 and whose gradient is the score function: without it the gradient of the estimate is not
             that of the KL. Where the clamp of x is active κ carries no gradient either. With kl_importance_weight
             κ = current/behaviour: the tokens are samples of the engine's policy, the KL is that of the current one
    reward   beta times the estimates of a token and of those behind it are subtracted from its advantage (Hu 2025);
             they are taken at the proximal policy and are data, without a gradient. Advantages are standardised
             before, because they are known before any forward pass
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_core.objective.segments import Segments
from grpo_core.objective.settings import ObjectiveSettings


def k3(log_ratio: Tensor) -> Tensor:
    """eˣ - 1 - x: unbiased, non-negative estimate of KL(p ‖ q) from x = log q/p at samples of p."""
    return torch.expm1(log_ratio) - log_ratio


def kl_estimate(limited: Tensor, kl_type: str) -> Tensor:
    """Estimate per token from the log-ratio x."""
    if kl_type == "k1":
        return -limited
    return limited.square() / 2 if kl_type == "k2" else k3(limited)


def kl_to_reference(current: Tensor, reference: Tensor, behaviour: Tensor, config: ObjectiveSettings) -> Tensor:
    """KL(current ‖ reference) per token, with the gradient of the loss term."""
    log_ratio = reference - current
    limited = log_ratio.clamp(-config.kl_input_clamp, config.kl_input_clamp)
    score = torch.where(log_ratio == limited, current, current.detach())
    log_kappa = score - (behaviour if config.kl_importance_weight else current.detach())
    # A weight that is not finite counts as 0; -inf in its place gives 0 for value and gradient alike.
    kappa = torch.where(log_kappa.detach().exp().isfinite(), log_kappa, -torch.inf).exp()
    return (kl_estimate(limited, config.kl_type) * kappa).clamp(-config.kl_output_clamp, config.kl_output_clamp)


def kl_penalised(
    advantages: Tensor, proximal: Tensor, reference: Tensor, segments: Segments, config: ObjectiveSettings
) -> Tensor:
    """Advantages less beta times the KL(proximal ‖ reference) of each token and of those behind it."""
    limited = (reference - proximal).clamp(-config.kl_input_clamp, config.kl_input_clamp)
    estimate = kl_estimate(limited, config.kl_type).clamp(-config.kl_output_clamp, config.kl_output_clamp)
    return advantages - config.beta * segments.to_go(estimate)
