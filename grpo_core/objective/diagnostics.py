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

Four of them come from one expm1(x), which keeps every digit near 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

Number = Tensor | float
Metrics = dict[str, tuple[Number, Number]]


def mismatch(logprobs: Tensor, old_logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor) -> Metrics:
    """The six figures above. Where `mask` is zero the inputs may hold anything."""
    trained = mask != 0
    return mismatch_of_trained(logprobs[trained], old_logprobs[trained], behaviour_logprobs[trained])


@torch.no_grad()
def mismatch_of_trained(current: Tensor, old: Tensor, behaviour: Tensor) -> Metrics:
    """The same, every token being trained."""
    x = old - behaviour
    excess = torch.expm1(x)
    ratio = excess + 1
    terms = {
        "token_mult_prob_error": torch.maximum(ratio, 1 / ratio),
        "gen_kl_error": excess - x,
        "policy_kl_error": x - excess / ratio,
        # log cosh(x/2), which is what half the sum of both terms comes to.
        "js_divergence_error": (excess.square() / ratio / 4).log1p_() / 2,
        "sampling_importance_ratio": ratio,
        "approx_entropy": (current - behaviour).exp_().mul_(current).neg_(),
    }
    return {name: (values.sum(), len(values)) for name, values in terms.items()}
