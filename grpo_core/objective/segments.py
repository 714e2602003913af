"""Sums, means and running sums over the sequences of a flat vector.

Contract: the token axis is the concatenation of sequences, each with at least one token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segments:
    """`lengths` int64 [sequences]: how many tokens belong to each sequence. Their sum is `tokens`."""

    lengths: Tensor
    tokens: int

    def sums(self, values: Tensor) -> Tensor:
        """[tokens] → Σ of each sequence, [sequences]."""
        sums: Tensor = torch.segment_reduce(values, "sum", lengths=self.lengths, unsafe=True)
        return sums

    def means(self, values: Tensor) -> Tensor:
        """[tokens] → mean of each sequence, [sequences]."""
        return self.sums(values) / self.lengths

    def spread(self, values: Tensor) -> Tensor:
        """[sequences] → each sequence's value on all of its tokens, [tokens]."""
        return torch.repeat_interleave(values, self.lengths, output_size=self.tokens)

    def to_go(self, values: Tensor) -> Tensor:
        """[tokens] → at each token the Σ over its sequence from there on, [tokens]."""
        behind = values.double().cumsum(0)
        ends = behind[self.lengths.cumsum(0) - 1]
        return (self.spread(ends) - behind + values).to(values.dtype)
