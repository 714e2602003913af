"""How far the engine that sampled and the trainer that learns disagree about the same tokens.

Contract: flat vectors [tokens] in nats, one value per token; each result is (Σ over trained tokens, number of trained
tokens), detached, so that sums over micro-batches and ranks stay exact. With x = old - behaviour, where old is the
trainer at the start of the step and behaviour the engine:

    token_mult_prob_error       mean exp|x|             1 when they agree; a factor between probabilities
    gen_kl_error                mean (eˣ - 1 - x)       k3 estimate of KL(behaviour ‖ old)
    policy_kl_error             mean (e⁻ˣ - 1 + x)      the same with the roles exchanged
    js_divergence_error         half the sum of both k3 terms, each against the log of the average probability
    sampling_importance_ratio   mean eˣ
    approx_entropy              -mean (e^(current - behaviour) · current)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Metrics = dict[str, tuple[Tensor, Tensor]]


def mismatch(logprobs: Tensor, old_logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor) -> Metrics:
    """The six figures above. Where `mask` is zero the inputs may hold anything."""
    trained = mask != 0
    current, old, behaviour = (
        torch.where(trained, values.detach(), 0.0) for values in (logprobs, old_logprobs, behaviour_logprobs)
    )
    x = old - behaviour
    average = torch.logaddexp(old, behaviour) - math.log(2.0)
    terms = {
        "token_mult_prob_error": x.abs().exp(),
        "gen_kl_error": k3(x),
        "policy_kl_error": k3(-x),
        "js_divergence_error": (k3(old - average) + k3(behaviour - average)) / 2,
        "sampling_importance_ratio": x.exp(),
        "approx_entropy": -(current - behaviour).exp() * current,
    }
    return {name: masked_sum(values, trained) for name, values in terms.items()}


def k3(log_ratio: Tensor) -> Tensor:
    """eˣ - 1 - x: unbiased, non-negative estimate of KL(p ‖ q) from x = log q/p at samples of p (Schulman 2020)."""
    return torch.expm1(log_ratio) - log_ratio


def masked_sum(values: Tensor, trained: Tensor) -> tuple[Tensor, Tensor]:
    """(Σ of the trained tokens' values, number of trained tokens), detached."""
    return torch.where(trained, values.detach(), 0.0).sum(), trained.sum()
