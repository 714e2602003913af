"""Log-probs and entropy of chosen tokens straight from hidden states, without ever holding [tokens, vocab].

Logits are computed tile by tile, reduced with a running log-sum-exp, and computed again in the backward pass. Memory
beyond the inputs and their gradients is a few tiles in the working precision: float32, or float64 for float64 hidden
states. Products of half-precision tensors are accumulated and returned in float32.

    z = logit_scale · hidden · weightᵀ;   z ← softcap · tanh(z / softcap), where there is one;   logit = z / temperature
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Tile(NamedTuple):
    """How many tokens and vocabulary entries are projected at a time."""

    tokens: int = 2048
    vocab: int = 16384


class LogprobError(ValueError):
    """Inputs whose shapes or values do not allow log-probs."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    tile: tuple[int, int] = Tile(),
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each target and the entropy of each distribution, both [tokens], in nats.

    `hidden` [tokens, width], `weight` [vocab, width] of the output projection, `targets` [tokens] integers in
    [0, vocab). `temperature` is the one the engine sampled with. Both results are differentiable with respect to
    `hidden` and `weight`. Raises LogprobError for shapes that do not match, a target outside the vocabulary or a
    temperature, softcap or tile that is not positive.
    """
    flat = hidden.dim() == 2 and weight.dim() == 2
    if not flat or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise LogprobError(
            f"hidden {list(hidden.shape)}, weight {list(weight.shape)} and targets {list(targets.shape)} do not match: "
            "expected [tokens, width], [vocab, width] and [tokens]"
        )
    if min(temperature, *tile) <= 0 or (softcap is not None and softcap <= 0):
        raise LogprobError(f"temperature {temperature}, softcap {softcap} and tile {tuple(tile)} must be positive")
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < weight.shape[0]:
        raise LogprobError(
            f"targets range from {int(targets.min())} to {int(targets.max())} but the vocabulary has {weight.shape[0]} "
            "entries: select the hidden states of real tokens first"
        )
    head = _Head(logit_scale, softcap, temperature)
    results: tuple[Tensor, Tensor] = _TokenLogprobs.apply(hidden, weight, targets, head, Tile(*tile))  # type: ignore[no-untyped-call]
    return results


class _Head(NamedTuple):
    """From raw projections to the logits that are sampled from, and back."""

    logit_scale: float
    softcap: float | None
    temperature: float

    def logits(self, projected: Tensor) -> Tensor:
        scaled = projected * self.logit_scale
        if self.softcap is not None:
            scaled = torch.tanh(scaled / self.softcap) * self.softcap
        return scaled / self.temperature

    def gradient(self, logits: Tensor, upstream: Tensor) -> Tensor:
        """∂/∂projected, given ∂/∂logits."""
        gradient = upstream * (self.logit_scale / self.temperature)
        if self.softcap is not None:
            gradient = gradient * (1 - (logits * (self.temperature / self.softcap)).square())
        return gradient


class _TokenLogprobs(torch.autograd.Function):
    """Differentiable in hidden and weight, once."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, head: _Head, tile: Tile
    ) -> tuple[Tensor, Tensor]:
        """Keep two numbers per token, log-sum-exp and entropy, for the second pass."""
        dtype = _working_dtype(hidden)
        normaliser, entropy, chosen = (torch.empty(len(hidden), dtype=dtype, device=hidden.device) for _ in range(3))
        for rows in _slices(len(hidden), tile.tokens):
            normaliser[rows], entropy[rows], chosen[rows] = _scan(hidden[rows], weight, targets[rows], head, tile.vocab)
        ctx.save_for_backward(hidden, weight, targets, normaliser, entropy)
        ctx.head, ctx.tile = head, tile
        return chosen - normaliser, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logprobs_gradient: Tensor, entropy_gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Project again, tile by tile, and accumulate both gradients in the working precision."""
        hidden, weight, targets, normaliser, entropy = ctx.saved_tensors
        dtype = _working_dtype(hidden)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        hidden_gradient = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device) if wants_hidden else None
        weight_gradient = torch.empty_like(weight) if wants_weight else None
        # Vocabulary outside, tokens inside: only one vocabulary tile of the weight's gradient is held in float32.
        for columns in _slices(len(weight), ctx.tile.vocab):
            columns_gradient = torch.zeros(weight[columns].shape, dtype=dtype, device=weight.device)
            for rows in _slices(len(hidden), ctx.tile.tokens):
                logits = ctx.head.logits(_matmul(hidden[rows], weight[columns].T))
                log_p = logits - normaliser[rows, None]
                p = log_p.exp()
                # ∂(log p_target)/∂logits = onehot - p;  ∂H/∂logits = -p (log p + H)
                surprise = entropy_gradient[rows, None] * (log_p + entropy[rows, None])
                upstream = -p * (logprobs_gradient[rows, None] + surprise)
                inside, place = _targets_inside(targets[rows], columns)
                upstream[inside, place] += logprobs_gradient[rows][inside]
                projected_gradient = ctx.head.gradient(logits, upstream)
                if hidden_gradient is not None:
                    hidden_gradient[rows] += _matmul(projected_gradient.to(weight.dtype), weight[columns])
                if wants_weight:
                    columns_gradient += _matmul(projected_gradient.T.to(hidden.dtype), hidden[rows])
            if weight_gradient is not None:
                weight_gradient[columns] = columns_gradient.to(weight.dtype)
        return None if hidden_gradient is None else hidden_gradient.to(hidden.dtype), weight_gradient, None, None, None


def _scan(hidden: Tensor, weight: Tensor, targets: Tensor, head: _Head, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """(log-sum-exp, entropy, target logit) of a few tokens, over vocabulary tiles.

    Keeps, relative to the running maximum m, s = Σ e^(z - m) and u = Σ e^(z - m)·(z - m): entropy = log s - u / s.
    """
    dtype = _working_dtype(hidden)
    maximum = torch.full((len(hidden),), -torch.inf, dtype=dtype, device=hidden.device)
    s, u, chosen = (torch.zeros_like(maximum) for _ in range(3))
    for columns in _slices(len(weight), width):
        logits = head.logits(_matmul(hidden, weight[columns].T))
        inside, place = _targets_inside(targets, columns)
        chosen[inside] = logits[inside, place]
        higher = torch.maximum(maximum, logits.amax(dim=1))
        # Before the first tile there is nothing to rescale, and its maximum of -inf must not become a NaN.
        shift = torch.where(torch.isinf(maximum), 0.0, maximum - higher)
        shifted = logits - higher[:, None]
        mass = shifted.exp()
        u = shift.exp() * (u + s * shift) + (mass * shifted).sum(dim=1)
        s = shift.exp() * s + mass.sum(dim=1)
        maximum = higher
    return maximum + s.log(), s.log() - u / s, chosen


def _targets_inside(targets: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Rows whose target lies in this vocabulary tile, and the target's place in it."""
    inside = torch.nonzero((targets >= columns.start) & (targets < columns.stop)).squeeze(1)
    return inside, targets[inside] - columns.start


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    """Product in the working dtype. On CUDA half precision runs on tensor cores, which accumulate in float32."""
    if left.dtype in (torch.float32, torch.float64) and left.dtype == right.dtype:
        return left @ right
    if left.is_cuda and left.dtype == right.dtype:
        return torch.mm(left, right, out_dtype=torch.float32)
    dtype = _working_dtype(left)
    return left.to(dtype) @ right.to(dtype)


def _working_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))
