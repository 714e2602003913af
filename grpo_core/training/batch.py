"""From rows of shards to the tensors of one micro-batch.

Contract: a `Row` is one sequence with its facts as NumPy arrays; a `Batch` is the concatenation of rows as the
policy and the loss take them. Predictions exist only where the next token was generated; a token beyond the window
keeps its place in the input and loses its gradient (`mask` false), as does nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grpo_core.training.attention import Packing
from grpo_core.trajectory import VersionSpan


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a shard. Arrays are [tokens]; `logprobs` is the engine's, 0 on tokens it did not generate."""

    ids: np.ndarray
    generated: np.ndarray
    logprobs: np.ndarray
    spans: tuple[VersionSpan, ...]

    def fresh(self, oldest: int) -> np.ndarray:
        """Generated tokens sampled from version `oldest` or a later one, bool [tokens]."""
        fresh = np.zeros(len(self.ids), dtype=bool)
        for span in self.spans:
            if span.version >= oldest:
                fresh[span.start : span.end] = True
        return fresh & self.generated


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch. Input tensors are [1, tokens]; the rest is flat [predictions]."""

    input_ids: Tensor
    position_ids: Tensor
    packing: Packing
    at: Tensor
    targets: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    sequence_ids: Tensor

    @classmethod
    def of(
        cls, rows: Sequence[Row], advantages: Sequence[float], *, oldest_version: int, device: torch.device
    ) -> Batch:
        """Pack `rows` in order. `advantages` is per row; tokens of versions below `oldest_version` are masked."""
        lengths = [len(row.ids) for row in rows]
        starts = np.cumsum([0, *lengths[:-1]])
        # The token at position i predicts the one at i + 1, so a row's first token is never a target.
        inside = [np.flatnonzero(row.generated[1:]) for row in rows]
        at = np.concatenate([start + where for start, where in zip(starts, inside, strict=True)])
        ids = np.concatenate([row.ids for row in rows])

        def flat(parts: list[np.ndarray], dtype: torch.dtype) -> Tensor:
            return torch.as_tensor(np.concatenate(parts), dtype=dtype, device=device)

        return cls(
            input_ids=flat([ids], torch.int64).unsqueeze(0),
            position_ids=flat([np.arange(length) for length in lengths], torch.int64).unsqueeze(0),
            packing=Packing.of(lengths, device),
            at=flat([at], torch.int64),
            targets=flat([ids[at + 1]], torch.int64),
            behaviour_logprobs=flat(
                [row.logprobs[where + 1] for row, where in zip(rows, inside, strict=True)], torch.float32
            ),
            advantages=flat(
                [np.full(len(where), value) for value, where in zip(advantages, inside, strict=True)], torch.float32
            ),
            mask=flat(
                [row.fresh(oldest_version)[where + 1] for row, where in zip(rows, inside, strict=True)], torch.bool
            ),
            sequence_ids=flat([np.full(len(where), number) for number, where in enumerate(inside)], torch.int64),
        )
