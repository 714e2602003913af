"""Log-probs and entropy of chosen tokens straight from hidden states, without ever holding [tokens, vocab].

Logits are computed tile by tile, reduced with a running log-sum-exp, and computed once more in the backward pass.
Memory beyond the inputs and their gradients is a few tiles in the working precision: float32, or float64 for float64
hidden states. Products of half-precision tensors are accumulated and returned in float32.

    z = logit_scale · hidden · weightᵀ;   z ← softcap · tanh(z / softcap), where there is one;   logit = z / temperature

Vocabulary is the outer loop and tokens the inner one in both passes, so a tile of the weight is converted once, and
only one tile of its gradient is held in float32. What is done to a tile is in tiles.py: as it is written on CPUs,
compiled on GPUs. No library kernel serves all of this: Liger's scaled cross-entropy (0.8) has both results and their
gradients at a temperature, but no soft-cap, and rounds the entropy to the dtype of its inputs; cut-cross-entropy (25.1)
has a soft-cap, but no entropy; neither takes a DTensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial

from grpo_core.objective.tiles import Head, Scan, Targets, Tile, Upstream, accumulate, product, tiles_of, usable

# On a CPU two tiles of float32 stay near the second-level cache. On a GPU a tile takes longer than starting its
# kernels, and is square, since what its products with both sides add to gradients is least then.
CPU_TILE = Tile(512, 2048)
GPU_TILE = Tile(8192, 8192)
# Tensor cores are fastest where the sides of a tile are multiples of this.
ALIGNMENT = 64


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
    tile: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each target and the entropy of each distribution, both [tokens], in nats.

    `hidden` [tokens, width], `weight` [vocab, width] of the output projection, `targets` [tokens] integers in
    [0, vocab). `temperature` is the one the engine sampled with. `tile` None: what suits the device. Both results are
    differentiable with respect to `hidden` and `weight`. A `weight` sharded as a DTensor is gathered once, and its
    gradient is the mean over the mesh, as FSDP2 has it. Raises LogprobError for shapes that do not match, a target
    outside the vocabulary or a temperature, softcap or tile that is not positive.
    """
    chosen_tile = Tile(*tile) if tile is not None else GPU_TILE if hidden.is_cuda else CPU_TILE
    flat = hidden.dim() == 2 and weight.dim() == 2
    if not flat or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise LogprobError(
            f"hidden {list(hidden.shape)}, weight {list(weight.shape)} and targets {list(targets.shape)} do not match: "
            "expected [tokens, width], [vocab, width] and [tokens]"
        )
    if min(temperature, *chosen_tile) <= 0 or (softcap is not None and softcap <= 0):
        raise LogprobError(
            f"temperature {temperature}, softcap {softcap} and tile {tuple(chosen_tile)} must be positive"
        )
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < weight.shape[0]:
        raise LogprobError(
            f"targets range from {int(targets.min())} to {int(targets.max())} but the vocabulary has {weight.shape[0]} "
            "entries: select the hidden states of real tokens first"
        )
    head = Head.of(logit_scale, softcap, temperature)
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    inputs = hidden.to(dtype), _gathered(weight).to(dtype)
    results: tuple[Tensor, Tensor] = _TokenLogprobs.apply(*inputs, targets, head, chosen_tile)  # type: ignore[no-untyped-call]
    return results


def _gathered(weight: Tensor) -> Tensor:
    """The whole weight. Each rank's gradient is that of its own tokens: the shards get the mean over the mesh."""
    if not isinstance(weight, DTensor):
        return weight
    mesh = weight.device_mesh
    whole = weight.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if whole.requires_grad:
        whole.register_hook(lambda gradient: gradient / mesh.size())
    return whole


class _TokenLogprobs(torch.autograd.Function):
    """Differentiable in hidden and weight, once."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, head: Head, tile: Tile
    ) -> tuple[Tensor, Tensor]:
        """Keep two numbers per token, log-sum-exp and entropy, for the second pass."""
        scan, tiles = Scan.start(hidden), tiles_of(hidden, head, tile)
        for columns in _slices(len(weight), tile.vocab):
            columns_weight = usable(weight[columns])
            for rows in _slices(len(hidden), tile.tokens):
                projections = tiles.project(hidden[rows], columns_weight)
                tiles.take(projections, Targets.of(targets[rows], columns), scan.at(rows))
        normaliser, entropy = scan.normaliser(), scan.entropy()
        ctx.save_for_backward(hidden, weight, targets, normaliser, entropy)
        ctx.head, ctx.tile = head, tile
        ctx.set_materialize_grads(False)
        return scan.chosen - normaliser, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, for_logprobs: Tensor | None, for_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        """Project again, tile by tile, and accumulate both gradients in the working precision."""
        hidden, weight, targets, normaliser, entropy = ctx.saved_tensors
        head, tile = ctx.head, ctx.tile
        upstream, left_out = Upstream.of(for_logprobs, for_entropy, normaliser, entropy)
        factor = left_out * head.factor
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        hidden_gradient = normaliser.new_zeros(hidden.shape) if wants_hidden else None
        weight_gradient = torch.empty_like(weight) if wants_weight else None
        tiles = tiles_of(hidden, head, tile)
        for columns in _slices(len(weight), tile.vocab):
            columns_weight = usable(weight[columns])
            columns_gradient = normaliser.new_zeros(columns_weight.shape)
            for rows in _slices(len(hidden), tile.tokens):
                projections = tiles.project(hidden[rows], columns_weight)
                place = Targets.of(targets[rows], columns)
                pull = tiles.pull(projections, place, upstream.at(rows), columns_weight.dtype)
                if hidden_gradient is not None:
                    hidden_gradient[rows].addcmul_(product(pull, columns_weight), factor[rows])
                if wants_weight:
                    accumulate(columns_gradient, pull.T, (hidden[rows] * factor[rows]).to(pull.dtype))
            if weight_gradient is not None:
                weight_gradient[columns] = columns_gradient
        return None if hidden_gradient is None else hidden_gradient.to(hidden.dtype), weight_gradient, None, None, None


def _slices(length: int, size: int) -> Iterator[slice]:
    """As few cuts of at most `size` as there can be, about even, so that none is left with a single row."""
    if length == 0:
        return
    even = -(-length // -(-length // size))
    step = min(size, -(-even // ALIGNMENT) * ALIGNMENT)
    yield from (slice(start, min(start + step, length)) for start in range(0, length, step))
