"""A loss on long flat vectors, computed for a few whole sequences at a time, gradient included.

Why: the loss makes some fifty intermediate vectors. Over a million tokens each of them goes to main memory and stays
there for the backward pass; over a block they stay in the cache, and nothing but one gradient per token is kept. On a
GPU, where starting a kernel costs more than running it, there is one block.

Contract: `compute` sees trained tokens only, so what stands at masked positions can change nothing; their gradient is
0. It maps a block to (scalar, metrics), and the whole is the sum over blocks: any split of whole sequences must sum to
the same, which losses.py guarantees. Differentiable once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_core.objective.diagnostics import Metrics, merge_sums
from grpo_core.objective.segments import Segments

# A vector of float32 is then a mebibyte, and all of a block's fit the last-level cache; smaller blocks cost more calls.
CPU_BLOCK_TOKENS = 262144


class Trained(NamedTuple):
    """The trained tokens of a few whole sequences:
    floating-point tensors [tokens] by name, and whose tokens they are."""

    tensors: dict[str, Tensor]
    segments: Segments

    def only(self, kept: Tensor) -> Trained:
        """Those of the sequences that are `kept`, bool [sequences]; the others might as well not be there."""
        if bool(kept.all()):
            return self
        places = self.segments.spread(kept).nonzero().squeeze(1)
        tensors = {name: values.index_select(0, places) for name, values in self.tensors.items()}
        return Trained(tensors, Segments(self.segments.lengths[kept], len(places)))


class Flat(NamedTuple):
    """Flat tensors [tokens] by name, bool which tokens are trained, how many,
    and their sequences' numbers, ascending."""

    tensors: dict[str, Tensor]
    mask: Tensor
    trained_tokens: int
    numbers: Tensor

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], mask: Tensor, sequence_ids: Tensor) -> Flat:
        """With the tokens of each sequence side by side and ids without large gaps, as they nearly always come."""
        trained = mask if mask.dtype == torch.bool else mask != 0
        count = int(trained.sum())
        ascending = len(mask) < 2 or int(sequence_ids.diff().min()) >= 0
        if ascending and (len(mask) == 0 or int(sequence_ids[-1] - sequence_ids[0]) < len(mask)):
            return cls(dict(tensors), trained, count, sequence_ids)
        numbers, order = torch.unique(sequence_ids, return_inverse=True)[1].sort(stable=True)
        return cls({name: values[order] for name, values in tensors.items()}, trained[order], count, numbers)

    def counts(self) -> tuple[int, int]:
        """(trained tokens, sequences with at least one)."""
        return self.trained_tokens, len(_lengths(self.numbers if self.whole else self.numbers[self.mask]))

    @property
    def whole(self) -> bool:
        """Whether every token is trained."""
        return self.trained_tokens == len(self.mask)

    def blocks(self) -> Iterator[slice]:
        """Cuts between sequences; no block but that of a single sequence is longer than allowed."""
        tokens, start = len(self.mask), 0
        allowed = tokens if self.mask.is_cuda else CPU_BLOCK_TOKENS
        while tokens - start > allowed:
            # Up to the sequence that crosses the limit, or behind it when it is the first of the block.
            crossing = self.numbers[start + allowed]
            end = int(torch.searchsorted(self.numbers, crossing))
            if end <= start:
                end = int(torch.searchsorted(self.numbers, crossing, right=True))
            yield slice(start, end)
            start = end
        yield slice(start, tokens)

    def trained(self, rows: slice, dtype: torch.dtype) -> tuple[Trained, Tensor | None]:
        """A block, and the places in it that are trained; None: all of them."""
        numbers = self.numbers[rows]
        tensors = {name: values.detach()[rows] for name, values in self.tensors.items()}
        places = None if self.whole else self.mask[rows].nonzero().squeeze(1)
        if places is not None:
            numbers = numbers.index_select(0, places)
            tensors = {name: values.index_select(0, places) for name, values in tensors.items()}
        tensors = {name: values.to(dtype) for name, values in tensors.items()}
        return Trained(tensors, Segments(_lengths(numbers), len(numbers))), places


def _lengths(numbers: Tensor) -> Tensor:
    """How often each number occurs in an ascending vector, without those that do not."""
    if len(numbers) == 0:
        return numbers.new_zeros(0)
    edges = torch.arange(int(numbers[0]), int(numbers[-1]) + 2, device=numbers.device)
    lengths = torch.searchsorted(numbers, edges).diff()
    return lengths[lengths > 0]


Compute = Callable[[Trained], tuple[Tensor, Metrics]]


def sum_over_blocks(compute: Compute, flat: Flat, differentiable: tuple[str, ...]) -> tuple[Tensor, Metrics]:
    """(Σ of the scalars, Σ of the metrics), the former differentiable in the tensors of these names."""
    metrics: Metrics = {}
    leaves = [flat.tensors[name] for name in differentiable]
    total: Tensor = _SumOverBlocks.apply(compute, flat, differentiable, metrics, *leaves)  # type: ignore[no-untyped-call]
    return total, metrics


class _SumOverBlocks(torch.autograd.Function):
    """The gradient is taken with the value, while a block's intermediates are at hand."""

    @staticmethod
    def forward(
        ctx: Any, compute: Compute, flat: Flat, names: tuple[str, ...], metrics: Metrics, *leaves: Tensor
    ) -> Tensor:
        """The sum of `compute` over the blocks, and into `metrics` what it measured."""
        dtype = torch.float64 if leaves[0].dtype == torch.float64 else torch.float32
        wanted = [name for name, needed in zip(names, ctx.needs_input_grad[4:], strict=True) if needed]
        empty = torch.empty_like if flat.whole else torch.zeros_like
        gradients = {name: empty(flat.tensors[name]) for name in wanted}
        total = torch.zeros((), dtype=dtype, device=leaves[0].device)
        for rows in flat.blocks():
            block, places = flat.trained(rows, dtype)
            with torch.enable_grad():
                inputs = [block.tensors[name].requires_grad_() for name in wanted]
                value, pairs = compute(block)
            parts = torch.autograd.grad(value, inputs, allow_unused=True, materialize_grads=True) if wanted else ()
            for name, part in zip(wanted, parts, strict=True):
                target = gradients[name][rows]
                _ = target.copy_(part) if places is None else target.index_copy_(0, places, part.to(target.dtype))
            total += value.detach()
            merge_sums(metrics, pairs)
        ctx.gradients = [gradients.get(name) for name in names]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        given = (None if gradient is None else gradient * upstream for gradient in ctx.gradients)
        return None, None, None, None, *given
