"""Log-probs and entropy of chosen tokens straight from hidden states, without ever holding [tokens, vocab].

Logits are computed tile by tile, reduced with a running log-sum-exp, and computed once more in the backward pass.
Memory beyond the inputs and their gradients is a few tiles in the working precision: float32, or float64 for float64
hidden states. Products of half-precision tensors are accumulated and returned in float32.

    z = logit_scale · hidden · weightᵀ;   z ← softcap · tanh(z / softcap), where there is one;   logit = z / temperature

Vocabulary is the outer loop and tokens the inner one in both passes, so a tile of the weight is converted once, and
only one tile of its gradient is held in float32. Factors of whole rows are applied to [tokens, width], never to tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial

# Below this, exp is 0 next to the largest term, and vector units leave their fast path.
NEGLIGIBLE = -80.0


class Tile(NamedTuple):
    """How many tokens and vocabulary entries are projected at a time."""

    tokens: int
    vocab: int


# On a CPU two tiles of float32 stay near the second-level cache; on a GPU a tile fills all multiprocessors.
CPU_TILE = Tile(512, 2048)
GPU_TILE = Tile(2048, 16384)


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
    head = _Head.of(logit_scale, softcap, temperature)
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


class _Head(NamedTuple):
    """From raw projections to the logits that are sampled from, and back.

    logit = projection · `before`, or tanh(projection · `before`) · `after` where there is a soft-cap.
    """

    before: float
    after: float | None

    @classmethod
    def of(cls, logit_scale: float, softcap: float | None, temperature: float) -> _Head:
        if softcap is None:
            return cls(logit_scale / temperature, None)
        return cls(logit_scale / softcap, softcap / temperature)

    def logits(self, hidden: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        """[tokens, vocab] of a tile, in `out` unless tensor cores widen the product of half-precision inputs."""
        if _on_tensor_cores(weight):
            logits = torch.mm(hidden, weight.T, out_dtype=torch.float32).mul_(self.before)
        else:
            logits = torch.mm(hidden.to(weight.dtype) * self.before, weight.T, out=out)
        return logits if self.after is None else logits.tanh_().mul_(self.after)

    def slope(self, logits: Tensor) -> Tensor | None:
        """∂logit/∂projection at every place, without `factor`; None where that leaves 1."""
        return None if self.after is None else (logits / self.after).square_().neg_().add_(1)

    @property
    def factor(self) -> float:
        """The part of the slope that is the same everywhere."""
        return self.before if self.after is None else self.before * self.after


class _TokenLogprobs(torch.autograd.Function):
    """Differentiable in hidden and weight, once."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, head: _Head, tile: Tile
    ) -> tuple[Tensor, Tensor]:
        """Keep two numbers per token, log-sum-exp and entropy, for the second pass."""
        scan, scratch = _Scan.start(hidden), _Scratch(hidden, tile)
        for columns in _slices(len(weight), tile.vocab):
            columns_weight = _usable(weight[columns])
            for rows in _slices(len(hidden), tile.tokens):
                first, second = scratch.views(rows, columns)
                logits = head.logits(hidden[rows], columns_weight, first)
                scan.add(rows, logits, _Targets.of(targets[rows], columns), second)
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
        upstream = _Upstream.of(for_logprobs, for_entropy, normaliser, entropy)
        factor = upstream.factor * head.factor
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        hidden_gradient = normaliser.new_zeros(hidden.shape) if wants_hidden else None
        weight_gradient = torch.empty_like(weight) if wants_weight else None
        scratch = _Scratch(hidden, tile)
        for columns in _slices(len(weight), tile.vocab):
            columns_weight = _usable(weight[columns])
            columns_gradient = normaliser.new_zeros(columns_weight.shape)
            for rows in _slices(len(hidden), tile.tokens):
                first, second = scratch.views(rows, columns)
                logits = head.logits(hidden[rows], columns_weight, first)
                slope = head.slope(logits)
                pull = upstream.pull(rows, logits, _Targets.of(targets[rows], columns), second)
                pull = (pull if slope is None else pull.mul_(slope)).to(columns_weight.dtype)
                if hidden_gradient is not None:
                    hidden_gradient[rows].addcmul_(_product(pull, columns_weight), factor[rows])
                if wants_weight:
                    _accumulate(columns_gradient, pull.T, (hidden[rows] * factor[rows]).to(pull.dtype))
            if weight_gradient is not None:
                weight_gradient[columns] = columns_gradient
        return None if hidden_gradient is None else hidden_gradient.to(hidden.dtype), weight_gradient, None, None, None


class _Targets(NamedTuple):
    """Where the targets of a tile's tokens lie in its vocabulary. Whether they do is data, so that no GPU must wait."""

    place: Tensor  # int64 [tokens, 1]
    inside: Tensor  # bool [tokens, 1]

    @classmethod
    def of(cls, targets: Tensor, columns: slice) -> _Targets:
        place = (targets - columns.start)[:, None]
        return cls(
            place.clamp(0, columns.stop - columns.start - 1),
            (targets >= columns.start)[:, None] & (targets < columns.stop)[:, None],
        )

    def pick(self, tile: Tensor) -> Tensor:
        """[tokens]: the tile's value at each target inside, 0 for the others."""
        return torch.where(self.inside, tile.gather(1, self.place), 0.0).squeeze(1)

    def subtract(self, tile: Tensor, values: Tensor | float) -> Tensor:
        """Subtract `values`, one or one per token, at each target inside."""
        at_target = torch.as_tensor(values, dtype=tile.dtype, device=tile.device).reshape(-1, 1)
        return tile.scatter_add_(1, self.place, torch.where(self.inside, -at_target, 0.0))


class _Scan(NamedTuple):
    """Running statistics of each token's logits z, all [tokens]: maximum m, s = Σ e^(z - m), u = Σ e^(z - m)·(z - m)
    and the logit of the target."""

    maximum: Tensor
    s: Tensor
    u: Tensor
    chosen: Tensor

    @classmethod
    def start(cls, hidden: Tensor) -> _Scan:
        """Nothing seen. The maximum is finite, so that the first rescaling is 0 · 0 and not 0 · ∞."""
        zeros = torch.zeros(len(hidden), dtype=_working_dtype(hidden), device=hidden.device)
        return cls(zeros + torch.finfo(zeros.dtype).min / 2, zeros, zeros.clone(), zeros.clone())

    def add(self, rows: slice, logits: Tensor, targets: _Targets, scratch: Tensor) -> None:
        """Take up one tile; overwrites `logits` and `scratch`."""
        maximum, s, u, chosen = (values[rows] for values in self)
        chosen += targets.pick(logits)
        higher = torch.maximum(maximum, logits.amax(dim=1))
        shift = maximum - higher
        shifted = logits.sub_(higher[:, None]).clamp_min_(NEGLIGIBLE)
        mass = torch.exp(shifted, out=scratch)
        decay = shift.exp()
        u.copy_(decay * (u + s * shift) + shifted.mul_(mass).sum(dim=1))
        s.copy_(decay * s + mass.sum(dim=1))
        maximum.copy_(higher)

    def normaliser(self) -> Tensor:
        return self.maximum + self.s.log()

    def entropy(self) -> Tensor:
        return self.s.log() - self.u / self.s


class _Upstream(NamedTuple):
    """What arrives from above. With g and e the gradients of log-prob and entropy, normaliser and entropy H known,

        -∂/∂logits = g (p - onehot) + e p (log p + H)

    Without e, the tile leaves out g, a factor of whole rows. `factor` [tokens, 1] is what it left out, negated.
    """

    g: Tensor
    e: Tensor | None
    normaliser: Tensor
    constant: Tensor
    factor: Tensor

    @classmethod
    def of(
        cls, for_logprobs: Tensor | None, for_entropy: Tensor | None, normaliser: Tensor, entropy: Tensor
    ) -> _Upstream:
        g = torch.zeros_like(normaliser) if for_logprobs is None else for_logprobs
        if for_entropy is None:
            return cls(g, None, normaliser, g, -g[:, None])
        return cls(g, for_entropy, normaliser, g + for_entropy * entropy, -torch.ones_like(g)[:, None])

    def pull(self, rows: slice, logits: Tensor, targets: _Targets, scratch: Tensor) -> Tensor:
        """The gradient of a tile, in place of its logits."""
        log_p = logits.sub_(self.normaliser[rows, None]).clamp_min_(NEGLIGIBLE)
        if self.e is None:
            return targets.subtract(log_p.exp_(), 1.0)
        p = torch.exp(log_p, out=scratch)
        pull = log_p.mul_(self.e[rows, None]).add_(self.constant[rows, None]).mul_(p)
        return targets.subtract(pull, self.g[rows])


class _Scratch:
    """Memory for two tiles, used again and again."""

    def __init__(self, hidden: Tensor, tile: Tile) -> None:
        self._flat = torch.empty(2, tile.tokens * tile.vocab, dtype=_working_dtype(hidden), device=hidden.device)

    def views(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """Two contiguous tiles of this size."""
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        first, second = (flat[: shape[0] * shape[1]].view(shape) for flat in self._flat)
        return first, second


def _on_tensor_cores(weight: Tensor) -> bool:
    return weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16)


def _usable(weight: Tensor) -> Tensor:
    """Half precision multiplies as it is on tensor cores, which accumulate in float32; elsewhere it is converted."""
    return weight if _on_tensor_cores(weight) else weight.to(_working_dtype(weight))


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Product of two tensors of one dtype, at least float32."""
    return torch.mm(left, right, out_dtype=torch.float32) if _on_tensor_cores(right) else left @ right


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right."""
    if _on_tensor_cores(right):
        total += _product(left, right)
    else:
        total.addmm_(left, right)


def _working_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))
