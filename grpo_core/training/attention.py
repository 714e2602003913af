"""Attention over packed sequences: no token sees another sequence.

A micro-batch arrives as one row of tokens, the concatenation of its sequences. Inside each layer the sequences are
laid side by side in a padded batch, attended to causally with PyTorch's own kernel, and concatenated again. The
cost is that of the padded batch, never of the whole row squared, and the result is that of each sequence alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

NAME = "packed_sequences"


@dataclass(frozen=True, slots=True)
class Packing:
    """Where each token of a packed row lives in the padded batch [sequences, longest]."""

    rows: int
    longest: int
    slots: Tensor  # int64 [tokens]: row * longest + position

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> Packing:
        """Packing of sequences of these lengths, in this order."""
        longest = max(lengths)
        slots = torch.cat([torch.arange(length) + row * longest for row, length in enumerate(lengths)])
        return cls(len(lengths), longest, slots.to(device))


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Causal attention of query [1, heads, tokens, width] on key and value [1, kv_heads, tokens, width]."""
    if sliding_window is not None and packing.longest > sliding_window:
        raise NotImplementedError(
            f"a sequence of {packing.longest} tokens exceeds the model's sliding window of {sliding_window}; shorten sequences"
        )
    queries, keys, values = (_side_by_side(tensor, packing) for tensor in (query, key, value))
    output = F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        is_causal=True,
        scale=scaling,
        dropout_p=dropout,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    tokens = output.permute(0, 2, 1, 3).reshape(packing.rows * packing.longest, *output.shape[1::2])
    return tokens.index_select(0, packing.slots).unsqueeze(0), None


def _side_by_side(tensor: Tensor, packing: Packing) -> Tensor:
    """[1, heads, tokens, width] → [sequences, heads, longest, width], zeros behind each sequence."""
    _, heads, _, width = tensor.shape
    flat = tensor.new_zeros(packing.rows * packing.longest, heads, width)
    flat = flat.index_copy(0, packing.slots, tensor[0].transpose(0, 1))
    return flat.view(packing.rows, packing.longest, heads, width).transpose(1, 2)


AttentionInterface.register(NAME, packed_attention)
