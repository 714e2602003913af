"""From rows of shards to the tensors of one micro-batch.

Contract: a `Row` is one sequence with its facts as NumPy arrays; a `Batch` is the concatenation of rows as the
policy and the loss take them. Predictions exist only where the next token was generated; a token beyond the window
keeps its place in the input and loses its gradient (`mask` false), as does nothing else. What a prediction is made
from may be a token that several sequences share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grpo_core.training.attention import Packing
from grpo_core.training.sharing import lay_out
from grpo_core.trajectory import VersionSpan


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a shard. Arrays are [tokens]; `logprobs` is the engine's, 0 on tokens it did not generate."""

    ids: np.ndarray
    generated: np.ndarray
    logprobs: np.ndarray
    spans: tuple[VersionSpan, ...]

    def fresh(self, oldest: int) -> np.ndarray:
        """The tokens that may be trained: generated, sampled from version `oldest` or a later one, and predicted, which
        the first token of a sequence is not. Bool [tokens]."""
        fresh = np.zeros(len(self.ids), dtype=bool)
        for span in self.spans:
            if span.version >= oldest:
                fresh[max(span.start, 1) : span.end] = True
        return fresh & self.generated

    def versions(self) -> np.ndarray:
        """The version that sampled each token, int64 [tokens]; 0 on tokens that were not generated."""
        versions = np.zeros(len(self.ids), dtype=np.int64)
        for span in self.spans:
            versions[span.start : span.end] = span.version
        return np.where(self.generated, versions, 0)


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch of one rank. Input tensors are [1, tokens]; the rest is flat, [predictions] but for the last two.

    `versions` sampled the targets. `sequence_tokens` [Σ lengths] are the positions of each sequence's tokens, sequence
    after sequence, and `sequence_lengths` [sequences] how many each has.
    """

    input_ids: Tensor
    position_ids: Tensor
    packing: Packing
    at: Tensor
    targets: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    sequence_ids: Tensor
    versions: Tensor
    positive: Tensor | None
    sequence_tokens: Tensor
    sequence_lengths: Tensor

    @classmethod
    def of(
        cls,
        rows: Sequence[Row],
        advantages: Sequence[float],
        *,
        oldest_version: int,
        device: torch.device,
        groups: Sequence[int] | None = None,
        trained: Sequence[bool] | None = None,
        positive: Sequence[bool] | None = None,
    ) -> Batch:
        """Pack `rows`; predictions keep their order. `advantages` is per row; tokens of versions below
        `oldest_version` are masked, and so are rows that are not `trained`. Rows of equal `groups` share the prefix
        they have in common; None: none do. `positive` is per row."""
        layout = lay_out([row.ids for row in rows], groups)
        # The token at position i predicts the one at i + 1, so a row's first token is never a target.
        inside = [np.flatnonzero(row.generated[1:]) for row in rows]

        def flat(parts: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
            return torch.as_tensor(np.concatenate(parts), dtype=dtype, device=device)

        def of_targets(parts: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
            return flat([part[where + 1] for part, where in zip(parts, inside, strict=True)], dtype)

        def of_rows(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return flat([np.full(len(where), value) for value, where in zip(values, inside, strict=True)], dtype)

        return cls(
            input_ids=flat([layout.ids], torch.int64).unsqueeze(0),
            position_ids=flat([layout.positions], torch.int64).unsqueeze(0),
            packing=Packing.of(layout.lengths, device, layout.parents),
            at=flat([place[where] for place, where in zip(layout.places, inside, strict=True)], torch.int64),
            targets=of_targets([row.ids for row in rows], torch.int64),
            behaviour_logprobs=of_targets([row.logprobs for row in rows], torch.float32),
            advantages=of_rows(advantages, torch.float32),
            mask=of_targets(
                [row.fresh(oldest_version) & may for row, may in zip(rows, trained or [True] * len(rows), strict=True)],
                torch.bool,
            ),
            sequence_ids=of_rows(range(len(rows)), torch.int64),
            versions=of_targets([row.versions() for row in rows], torch.int64),
            positive=None if positive is None else of_rows(positive, torch.bool),
            sequence_tokens=flat(layout.places, torch.int64),
            sequence_lengths=torch.tensor([len(row.ids) for row in rows], device=device),
        )

    def split(self, values: Tensor) -> list[np.ndarray]:
        """Values [predictions] by sequence, float32."""
        counts = np.bincount(self.sequence_ids.cpu().numpy(), minlength=len(self.sequence_lengths))
        return np.split(values.detach().float().cpu().numpy(), counts.cumsum()[:-1])

    def saving(self) -> tuple[float, float]:
        """(tokens that shared prefixes save, tokens of all sequences)."""
        tokens = len(self.sequence_tokens)
        return float(tokens - self.input_ids.shape[1]), float(tokens)
