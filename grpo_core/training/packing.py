"""Which sequences share a row, and which rows share a micro-batch.

A micro-batch has one row per rank; a row is a concatenation of whole sequences. Ranks wait for each other in every
micro-batch, so the plan makes few micro-batches and gives the rows of each about the same attention work, for which
Σ L² stands.

Invariants: every sequence that fits the token budget is in exactly one row, the others are in `oversize`; no row is
empty or over the budget; the plan depends on nothing but the arguments.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

Rows = list[list[int]]


class PackingError(ValueError):
    """Sequences that cannot fill every row. `missing` more, each of one token, would do."""

    def __init__(self, message: str, missing: int = 0) -> None:
        super().__init__(message)
        self.missing = missing


@dataclass(frozen=True, slots=True)
class Plan:
    """`micro_batches[m][r]` lists the sequences of rank r in micro-batch m; `oversize` those longer than the budget."""

    micro_batches: list[Rows] = field(default_factory=list)
    oversize: list[int] = field(default_factory=list)


def pack(lengths: Sequence[int], *, rows: int, token_budget: int, work: Sequence[int] | None = None) -> Plan:
    """Pack sequences of `lengths` tokens into micro-batches of `rows` rows of at most `token_budget` tokens.

    `work` is the attention work of each, in tokens squared; None: the square of its length.

    Uses the fewest micro-batches that the total length allows wherever spreading the longest first succeeds, and
    otherwise as many as best fit needs. Without a sequence that fits, the plan has no micro-batch. Raises PackingError
    when there are fewer sequences than rows to fill, or for a length, row count or budget below 1.
    """
    lengths = [int(length) for length in lengths]
    work = [length * length for length in lengths] if work is None else work
    if rows < 1 or token_budget < 1 or min(lengths, default=1) < 1:
        raise PackingError(
            f"cannot pack lengths from {min(lengths, default=1)} tokens into {rows} rows of {token_budget} tokens: "
            "each must be at least 1"
        )
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    first = next((place for place, index in enumerate(order) if lengths[index] <= token_budget), len(order))
    oversize, fitting = sorted(order[:first]), order[first:]
    if not fitting:
        return Plan([], oversize)
    needed = _round_up(_divide_up(sum(lengths[index] for index in fitting), token_budget), rows)
    filled = None
    if needed == rows:
        filled = _spread(fitting, lengths, work, needed, token_budget)
    filled = filled or _spread(fitting, lengths, lengths, needed, token_budget)
    filled = filled or _best_fit(fitting, lengths, token_budget)
    filled = _fill_empty(filled, _round_up(len(filled), rows), len(oversize))
    return Plan(_group(filled, work, rows), oversize)


def _divide_up(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _round_up(count: int, multiple: int) -> int:
    return _divide_up(count, multiple) * multiple


def _spread(order: list[int], lengths: Sequence[int], loads: Sequence[int], count: int, budget: int) -> Rows | None:
    """Longest first, each into the row with the least load (LPT, Graham 1969); None when that row has no space."""
    rows: Rows = [[] for _ in range(count)]
    tokens = [0] * count
    heap = [(0, row) for row in range(count)]
    for index in order:
        load, row = heap[0]
        tokens[row] += lengths[index]
        if tokens[row] > budget:
            return None
        rows[row].append(index)
        heapq.heapreplace(heap, (load + loads[index], row))
    return rows


def _best_fit(order: list[int], lengths: Sequence[int], budget: int) -> Rows:
    """Longest first, each into the fullest row with space, else into a new row."""
    rows: Rows = []
    spaces: list[tuple[int, int]] = []
    for index in order:
        place = bisect_left(spaces, (lengths[index], -1))
        if place == len(spaces):
            space, row = budget, len(rows)
            rows.append([])
        else:
            space, row = spaces.pop(place)
        rows[row].append(index)
        insort(spaces, (space - lengths[index], row))
    return rows


def _fill_empty(rows: Rows, count: int, oversize: int) -> Rows:
    """Bring the rows to `count`, none empty, by moving the shortest sequence out of the row that holds most."""
    sequences = sum(map(len, rows))
    if sequences < count:
        raise PackingError(
            f"{sequences} sequences cannot fill {count} rows without leaving one empty ({oversize} more exceed "
            f"the token budget): add {count - sequences} fillers without trained tokens, or use fewer rows",
            missing=count - sequences,
        )
    rows = rows + [[] for _ in range(count - len(rows))]
    heap = [(-len(row), place) for place, row in enumerate(rows)]
    heapq.heapify(heap)
    for row in rows:
        if not row:
            size, donor = heap[0]
            row.append(rows[donor].pop())
            heapq.heapreplace(heap, (size + 1, donor))
    return rows


def _group(filled: Rows, work: Sequence[int], rows: int) -> list[Rows]:
    """Rows of neighbouring work form a micro-batch; its heaviest goes to the rank with the least work so far."""
    loads = [sum(work[index] for index in row) for row in filled]
    heaviest_first = sorted(range(len(filled)), key=loads.__getitem__, reverse=True)
    totals = [0] * rows
    micro_batches = []
    for start in range(0, len(filled), rows):
        ranks = sorted(range(rows), key=totals.__getitem__)
        micro_batch: Rows = [[] for _ in range(rows)]
        for rank, row in zip(ranks, heaviest_first[start : start + rows], strict=True):
            micro_batch[rank] = filled[row]
            totals[rank] += loads[row]
        micro_batches.append(micro_batch)
    return micro_batches
