"""Attention over packed sequences: no token sees another sequence, and a prefix that several share is there once.

A micro-batch arrives as one row of tokens, the concatenation of *segments*. A segment is a whole sequence, a prefix
that several sequences begin with, or what follows such a prefix (its `parent`). A token sees its parent's tokens and
those of its own segment up to itself; a sliding window of a layer counts positions within the sequence.

Two layouts of the same attention, chosen by device. On CPUs the segments are laid side by side, each with the keys of
its whole path, and attended to with PyTorch's own kernel; the cost is that of the padded batch, never of the whole row
squared. On GPUs flex attention skips the blocks of the row in which nothing is seen, so that nothing is padded and the
keys of a shared prefix are not repeated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface

NAME = "packed_sequences"
BLOCK = 128
NO_PARENT = -1


class AttentionError(NotImplementedError):
    """The model's attention has a part that packed sequences cannot be given."""


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Some segments: queries [segments, longest], keys [segments, longest path]."""

    query_tokens: Tensor  # int64 [segments, queries]: token at each place; where there is none, the first
    key_tokens: Tensor  # int64 [segments, keys]
    query_positions: Tensor  # int64 [segments, queries]: position in the sequence; behind the end, the last one
    continues: bool  # whether the segments have parents

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, dropout: float, window: int | None
    ) -> Tensor:
        """Output [segments · queries, heads, width]."""
        queries = _side_by_side(query, self.query_tokens)
        keys, values = _side_by_side(key, self.key_tokens), _side_by_side(value, self.key_tokens)
        plain = not self.continues and (window is None or window >= self.key_tokens.shape[1])
        output = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=None if plain else self._seen(window),
            is_causal=plain,
            scale=scale,
            dropout_p=dropout,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.transpose(1, 2).flatten(0, 1)

    def _seen(self, window: int | None) -> Tensor:
        """Which keys each query sees, bool [segments, 1, queries, keys]."""
        positions = self.query_positions[:, None, :, None]
        places = torch.arange(self.key_tokens.shape[1], device=positions.device)
        seen = places <= positions
        return seen if window is None else seen & (places > positions - window)


@dataclass(frozen=True, slots=True)
class Padded:
    """Segments side by side: those without a parent, and those with one, which have few queries and many keys."""

    parts: tuple[SideBySide, ...]
    slots: Tensor  # int64 [tokens]: place of each token among the outputs of the parts, one after the other

    @classmethod
    def of(cls, lengths: Sequence[int], parents: Sequence[int], device: torch.device) -> Padded:
        """Layout of segments of these lengths; `parents[i]` is a segment before i without a parent, or NO_PARENT."""
        starts = np.cumsum([0, *lengths[:-1]])
        owns = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        slots = np.zeros(sum(lengths), dtype=np.int64)
        parts, outputs = [], 0
        for continues in (False, True):
            chosen = [index for index, parent in enumerate(parents) if (parent != NO_PARENT) == continues]
            if not chosen:
                continue
            paths = [np.concatenate([owns[parents[i]], owns[i]]) if continues else owns[i] for i in chosen]
            width, longest = max(lengths[index] for index in chosen), max(map(len, paths))
            queries, keys = (np.zeros((len(chosen), size), dtype=np.int64) for size in (width, longest))
            positions = np.empty_like(queries)
            for row, (index, path) in enumerate(zip(chosen, paths, strict=True)):
                queries[row, : lengths[index]] = owns[index]
                keys[row, : len(path)] = path
                positions[row] = np.minimum(len(path) - lengths[index] + np.arange(width), len(path) - 1)
                slots[owns[index]] = outputs + row * width + np.arange(lengths[index])
            parts.append(SideBySide(_on(device, queries), _on(device, keys), _on(device, positions), continues))
            outputs += queries.size
        return cls(tuple(parts), _on(device, slots))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, dropout: float, window: int | None
    ) -> Tensor:
        """Output [tokens, heads, width] of query [1, heads, tokens, width], key and value [1,
        kv_heads, tokens, width]."""
        outputs = [part.attend(query, key, value, scale=scale, dropout=dropout, window=window) for part in self.parts]
        return torch.cat(outputs).index_select(0, self.slots)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The row as it is, and which blocks of it see which."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    segments: Tensor  # int64 [tokens]
    parent_segments: Tensor  # int64 [tokens]
    positions: Tensor  # int64 [tokens]: in the sequence
    longest: int
    masks: dict[int | None, BlockMask] = field(default_factory=dict)  # by window, made on first use

    @classmethod
    def of(cls, lengths: Sequence[int], parents: Sequence[int], device: torch.device) -> Blocks:
        """Layout of the same segments as `Padded.of` takes."""
        before = [0 if parent == NO_PARENT else lengths[parent] for parent in parents]
        positions = np.concatenate([first + np.arange(length) for first, length in zip(before, lengths, strict=True)])
        made = cls(
            lengths=tuple(lengths),
            parents=tuple(parents),
            segments=_on(device, np.repeat(np.arange(len(lengths)), lengths)),
            parent_segments=_on(device, np.repeat(parents, lengths)),
            positions=_on(device, positions),
            longest=int(positions.max()) + 1,
        )
        made.make_mask(None)
        return made

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, dropout: float, window: int | None
    ) -> Tensor:
        """As `Padded.attend`."""
        if dropout:
            raise AttentionError(f"attention dropout is {dropout}, which flex attention does not have; set it to 0")
        window = window if window is not None and window < self.longest else None
        if window not in self.masks:
            self.make_mask(window)
        output = _flex_attention(compiled=query.is_cuda)(
            query,
            key,
            value,
            block_mask=self.masks[window],
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output[0].transpose(0, 1)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def make_mask(self, window: int | None) -> None:
        """Make the mask of layers with this window."""
        segments, parents, positions = self.segments, self.parent_segments, self.positions
        reach = self.longest if window is None else window

        def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            own = (segments[query] == segments[key]) & (key <= query)
            return own | (parents[query] == segments[key])

        def seen_in_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return seen(batch, head, query, key) & (positions[query] - positions[key] < reach)

        some, whole = block_structure(self.lengths, self.parents, BLOCK)
        if window is not None:
            # Every block that is seen at all is looked at token by token.
            some, whole = some | whole, np.zeros_like(whole)
        (count, columns), (whole_count, whole_columns) = (_ordered(blocks, segments.device) for blocks in (some, whole))
        self.masks[window] = BlockMask.from_kv_blocks(
            count,
            columns,
            whole_count,
            whole_columns,
            BLOCK_SIZE=BLOCK,
            mask_mod=seen if window is None else seen_in_window,
            seq_lengths=(len(segments), len(segments)),
        )


@dataclass(frozen=True, slots=True)
class Packing:
    """How the segments of one row of tokens see each other."""

    layout: Padded | Blocks

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, parents: Sequence[int] | None = None) -> Packing:
        """Packing of segments of these lengths, in this order; `parents` None: all are whole sequences."""
        parents = [NO_PARENT] * len(lengths) if parents is None else parents
        layout: type[Padded] | type[Blocks] = Blocks if device.type == "cuda" else Padded
        return cls(layout.of(lengths, parents, device))


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
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention of query [1, heads, tokens, width] to key and value [1, kv_heads, tokens, width], as transformers calls
    it. Raises AttentionError for attention sinks, soft-capped scores and a mask of the model's own."""
    parts = {
        "attention sinks": s_aux is not None,
        f"soft-capped attention scores (softcap {softcap})": softcap is not None,
        "an attention mask of its own": attention_mask is not None,
    }
    if any(parts.values()):
        part = next(name for name, present in parts.items() if present)
        raise AttentionError(f"{type(module).__name__} has {part}, which packed attention lacks; choose another model")
    output = packing.layout.attend(query, key, value, scale=scaling, dropout=dropout, window=sliding_window)
    return output.unsqueeze(0), None


def block_structure(lengths: Sequence[int], parents: Sequence[int], block: int) -> tuple[np.ndarray, np.ndarray]:
    """(blocks of which some pairs are seen, blocks of which all are), each bool [query blocks, key blocks], disjoint.

    A block counts among the first when it is not known to be seen whole. The cost is that of the blocks, not of the
    tokens squared.
    """
    starts = np.cumsum([0, *lengths])
    count = -(-int(starts[-1]) // block)
    touched, whole = np.zeros((count, count), dtype=bool), np.zeros((count, count), dtype=bool)
    for segment, parent in enumerate(parents):
        begin, end = int(starts[segment]), int(starts[segment + 1])
        first, last = begin // block, (end - 1) // block
        inner = range(-(-begin // block), end // block)
        for query in range(first, last + 1):
            touched[query, first : query + 1] = True
        for query in inner:
            whole[query, inner.start : query] = True
        if parent != NO_PARENT:
            begin, end = int(starts[parent]), int(starts[parent + 1])
            touched[first : last + 1, begin // block : (end - 1) // block + 1] = True
            whole[inner.start : inner.stop, -(-begin // block) : end // block] = True
    return touched & ~whole, whole


def _on(device: torch.device, array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).to(device)


def _ordered(blocks: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """(number of blocks in each row, their columns in front), int32 [1, 1, rows] and [1, 1, rows, columns]."""
    dense = _on(device, blocks)
    columns = torch.argsort(dense.int(), dim=-1, descending=True, stable=True)
    return dense.sum(-1, dtype=torch.int32)[None, None], columns.int()[None, None]


def _side_by_side(tensor: Tensor, tokens: Tensor) -> Tensor:
    """[1, heads, tokens, width] → [segments, heads, longest, width]."""
    rows = tensor[0].transpose(0, 1).index_select(0, tokens.flatten())
    return rows.view(*tokens.shape, *rows.shape[1:]).transpose(1, 2)


@functools.cache
def _flex_attention(*, compiled: bool) -> Callable[..., Tensor]:
    kernel: Callable[..., Tensor] = flex_attention
    return torch.compile(kernel) if compiled else kernel


AttentionInterface.register(NAME, packed_attention)
