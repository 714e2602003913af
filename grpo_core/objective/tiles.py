"""What is done to one tile of logits between its products, in both passes of logprobs.py.

`take` and `pull` are all of it. On CPUs they run as they are, in memory that is used again; on GPUs torch.compile makes
of each a kernel or two that read a tile once. On CPUs that would gain a twentieth, and cost a compiler and seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# Below this, exp is 0 next to the largest term, and vector units leave their fast path.
NEGLIGIBLE = -80.0


class Tile(NamedTuple):
    """How many tokens and vocabulary entries are projected at a time."""

    tokens: int
    vocab: int


class Head(NamedTuple):
    """From raw projections to the logits that are sampled from, and back.

    logit = projection · `before`, or tanh(projection · `before`) · `after` where there is a soft-cap.
    """

    before: float | Tensor
    after: float | Tensor | None

    @classmethod
    def of(cls, logit_scale: float, softcap: float | None, temperature: float) -> Head:
        if softcap is None:
            return cls(logit_scale / temperature, None)
        return cls(logit_scale / softcap, softcap / temperature)

    def logits(self, tile: Tensor) -> Tensor:
        """Those of a tile of projections that were multiplied by `before`, in its place."""
        return tile if self.after is None else tile.tanh_().mul_(self.after)

    def slope(self, logits: Tensor) -> Tensor | None:
        """∂logit/∂projection at every place, without `factor`; None where that leaves 1."""
        return None if self.after is None else (logits / self.after).square_().neg_().add_(1)

    @property
    def factor(self) -> float | Tensor:
        """The part of the slope that is the same everywhere."""
        return self.before if self.after is None else self.before * self.after

    def on(self, one: Tensor) -> Head:
        """The same as tensors like `one`, a scalar 1, which compiled code takes as they come, where it would be
        compiled again for every new number."""
        return Head(one * self.before, None if self.after is None else one * self.after)


class Targets(NamedTuple):
    """Where the targets of a tile's tokens lie in its vocabulary. Whether they do is data, so that no GPU must wait."""

    place: Tensor  # int64 [tokens, 1]
    inside: Tensor  # bool [tokens, 1]

    @classmethod
    def of(cls, targets: Tensor, columns: slice) -> Targets:
        place = (targets - columns.start)[:, None]
        return cls(
            place.clamp(0, columns.stop - columns.start - 1),
            (targets >= columns.start)[:, None] & (targets < columns.stop)[:, None],
        )

    def pick(self, tile: Tensor) -> Tensor:
        """[tokens]: the tile's value at each target inside, 0 for the others."""
        return torch.where(self.inside, tile.gather(1, self.place), 0.0).squeeze(1)


class Scan(NamedTuple):
    """Running statistics of each token's logits z, all [tokens]: maximum m, s = Σ e^(z - m), u = Σ e^(z - m)·(z - m)
    and the logit of the target."""

    maximum: Tensor
    s: Tensor
    u: Tensor
    chosen: Tensor

    @classmethod
    def start(cls, hidden: Tensor) -> Scan:
        """Nothing seen. The maximum is finite, so that the first rescaling is 0 · 0 and not 0 · ∞."""
        zeros = torch.zeros(len(hidden), dtype=working_dtype(hidden), device=hidden.device)
        return cls(zeros + torch.finfo(zeros.dtype).min / 2, zeros, zeros.clone(), zeros.clone())

    def at(self, rows: slice) -> Scan:
        """Those of some tokens, as views."""
        return Scan(*(values[rows] for values in self))

    def add(self, logits: Tensor, targets: Targets, scratch: Tensor) -> None:
        """Take up one tile of these tokens; overwrites `logits` and `scratch`."""
        maximum, s, u, chosen = self
        chosen.add_(targets.pick(logits))
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


class Upstream(NamedTuple):
    """What arrives from above, each [tokens, 1]. With g and e the gradients of log-prob and entropy, normaliser and
    entropy H known,

        -∂/∂logits = g (p - onehot) + e p (log p + H)

    Without e, a tile leaves out g, a factor of whole rows.
    """

    certain: Tensor  # what is taken off at the target: g, or 1 where that is left out
    e: Tensor | None
    constant: Tensor  # g + e H
    normaliser: Tensor

    @classmethod
    def of(
        cls, for_logprobs: Tensor | None, for_entropy: Tensor | None, normaliser: Tensor, entropy: Tensor
    ) -> tuple[Upstream, Tensor]:
        """With what the tiles leave out, [tokens, 1]."""
        g = (torch.zeros_like(normaliser) if for_logprobs is None else for_logprobs)[:, None]
        ones, normaliser = torch.ones_like(g), normaliser[:, None]
        if for_entropy is None:
            return cls(ones, None, g, normaliser), -g
        e = for_entropy[:, None]
        return cls(g, e, g + e * entropy[:, None], normaliser), -ones

    def at(self, rows: slice) -> Upstream:
        """That of some tokens, as views."""
        e = None if self.e is None else self.e[rows]
        return Upstream(self.certain[rows], e, self.constant[rows], self.normaliser[rows])

    def pull(self, logits: Tensor, head: Head, scratch: Tensor, off: Tensor | None = None) -> Tensor:
        """The gradient of projections, without the factors of rows; overwrites `logits` and `scratch`. `off`, of the
        same shape, is what is taken off for targets."""
        slope = head.slope(logits)
        log_p = logits.sub_(self.normaliser).clamp_min_(NEGLIGIBLE)
        if self.e is None:
            pull = log_p.exp_()
        else:
            p = torch.exp(log_p, out=scratch)
            pull = log_p.mul_(self.e).add_(self.constant).mul_(p)
        pull = pull if off is None else pull.sub_(off)
        return pull if slope is None else pull.mul_(slope)


def take(tile: Tensor, head: Head, targets: Targets, scan: Scan, scratch: Tensor) -> None:
    """First pass: take up a tile of projections into the statistics of its tokens; overwrites both tiles."""
    scan.add(head.logits(tile), targets, scratch)


def pull(tile: Tensor, head: Head, targets: Targets, upstream: Upstream, dtype: torch.dtype, scratch: Tensor) -> Tensor:
    """Second pass: the gradient of a tile of projections, in `dtype`; overwrites both tiles.

    What stands at the targets is computed apart and put into place, so that it is as exact in half precision.
    """
    logits = head.logits(tile)
    chosen = logits.gather(1, targets.place)
    off = torch.where(targets.inside, upstream.certain, 0.0)
    at_target = upstream.pull(chosen, head, torch.empty_like(chosen), off)
    return upstream.pull(logits, head, scratch).to(dtype).scatter_(1, targets.place, at_target.to(dtype))


class Tiles(Protocol):
    """Projections of some tokens to some of the vocabulary, and what becomes of them."""

    def project(self, hidden: Tensor, weight: Tensor) -> Tensor: ...

    def take(self, projections: Tensor, targets: Targets, scan: Scan) -> None: ...

    def pull(self, projections: Tensor, targets: Targets, upstream: Upstream, dtype: torch.dtype) -> Tensor: ...


class EagerTiles:
    """Two tiles of memory, used again and again. Rows are multiplied by `before`, which a tile then need not be."""

    def __init__(self, hidden: Tensor, head: Head, tile: Tile) -> None:
        self._flat = torch.empty(2, tile.tokens * tile.vocab, dtype=working_dtype(hidden), device=hidden.device)
        self._head = head

    def project(self, hidden: Tensor, weight: Tensor) -> Tensor:
        out = self._flat[0, : len(hidden) * len(weight)].view(len(hidden), len(weight))
        return torch.mm(hidden.to(weight.dtype) * self._head.before, weight.T, out=out)

    def take(self, projections: Tensor, targets: Targets, scan: Scan) -> None:
        take(projections, self._head, targets, scan, self._like(projections))

    def pull(self, projections: Tensor, targets: Targets, upstream: Upstream, dtype: torch.dtype) -> Tensor:
        return pull(projections, self._head, targets, upstream, dtype, self._like(projections))

    def _like(self, projections: Tensor) -> Tensor:
        return self._flat[1, : projections.numel()].view(projections.shape)


class CompiledTiles:
    """The same functions on tiles of their own, which the compiler takes away again."""

    def __init__(self, hidden: Tensor, head: Head) -> None:
        self._head = head.on(torch.ones((), dtype=working_dtype(hidden), device=hidden.device))
        self._take, self._pull = _compiled()

    def project(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return product(hidden.to(weight.dtype), weight.T)

    def take(self, projections: Tensor, targets: Targets, scan: Scan) -> None:
        self._take(projections, self._head, targets, scan)

    def pull(self, projections: Tensor, targets: Targets, upstream: Upstream, dtype: torch.dtype) -> Tensor:
        gradient: Tensor = self._pull(projections, self._head, targets, upstream, dtype)
        return gradient


@functools.cache
def _compiled() -> tuple[Callable[..., None], Callable[..., Tensor]]:
    """`take` and `pull` for tiles of any size: sizes are symbols, so that no tile of another size is compiled again."""

    def compiled_take(projections: Tensor, head: Head, targets: Targets, scan: Scan) -> None:
        take(projections * head.before, head, targets, scan, torch.empty_like(projections))

    def compiled_pull(
        projections: Tensor, head: Head, targets: Targets, upstream: Upstream, dtype: torch.dtype
    ) -> Tensor:
        scratch = torch.empty_like(projections)
        return pull(projections * head.before, head, targets, upstream, dtype, scratch)

    return torch.compile(compiled_take, dynamic=True), torch.compile(compiled_pull, dynamic=True)


def tiles_of(hidden: Tensor, head: Head, tile: Tile) -> Tiles:
    """What suits the device of these hidden states."""
    return CompiledTiles(hidden, head) if hidden.is_cuda else EagerTiles(hidden, head, tile)


def _on_tensor_cores(weight: Tensor) -> bool:
    return weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16)


def usable(weight: Tensor) -> Tensor:
    """Half precision multiplies as it is on tensor cores, which accumulate in float32; elsewhere it is converted."""
    return weight if _on_tensor_cores(weight) else weight.to(working_dtype(weight))


def product(left: Tensor, right: Tensor) -> Tensor:
    """Product of two tensors of one dtype, at least float32."""
    return torch.mm(left, right, out_dtype=torch.float32) if _on_tensor_cores(right) else left @ right


def accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right."""
    if _on_tensor_cores(right):
        total += product(left, right)
    else:
        total.addmm_(left, right)


def working_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
