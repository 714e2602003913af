"""How evenly a router spreads the tokens of a sequence over its experts.

The usual auxiliary loss (Fedus et al. 2021) takes its averages over whatever shares a micro-batch, so its value
depends on how sequences were packed. Here they are those of each sequence, as in DeepSeek-V2 (2024, §2.2.3), so that
the sum over sequences is the same for any packing and any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def load_imbalance(
    router_logits: Sequence[Tensor], tokens: Tensor, lengths: Tensor, *, experts_per_token: int
) -> Tensor:
    """Experts · Σ over experts of (share of tokens sent there · mean probability), by sequence, mean over layers.

    `router_logits` [tokens, experts] of each layer; `tokens` [Σ lengths] the positions of each sequence's tokens,
    sequence after sequence. [sequences]; `experts_per_token` where the load is even, and Experts where all of it goes
    to as few experts as a token has.
    """
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    totals = []
    for logits in router_logits:
        probabilities = torch.softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
        chosen = probabilities.detach().topk(experts_per_token, dim=-1).indices
        sent = torch.zeros_like(probabilities).scatter_(1, chosen, 1.0)
        share, mean = (
            torch.zeros(len(lengths), values.shape[1], dtype=values.dtype, device=values.device).index_add(
                0, sequence, values.index_select(0, tokens)
            )
            / lengths[:, None]
            for values in (sent, probabilities)
        )
        totals.append(probabilities.shape[1] * (share * mean).sum(-1))
    return torch.stack(totals).mean(0)
