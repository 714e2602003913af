"""Prefixes that the sequences of a group share go through the model once.

A group answers one prompt, so its sequences begin alike. Where several of a group lie in one row, the tokens that
all of them begin with are laid out once, as a segment of their own, and what follows in each is a segment whose
parent that is. Keys, values and hidden states of the prefix are the same for all of them, so loss and gradient stay
those of the sequences alone.

Invariants: sequences of different groups never share; every sequence keeps at least one token of its own; a row that
fits its budget when it is planned fits when it is laid out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_core.training.attention import NO_PARENT
from grpo_core.training.packing import PackingError, Plan, pack

# A row is planned from pieces of groups of at most this share of its budget: large pieces save most tokens, small
# ones fill rows better, and the best plan of all is taken.
PIECES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Layout:
    """One row. `places[i]` are the positions, in the row, of each token of sequence i, the shared ones included."""

    ids: np.ndarray
    positions: np.ndarray
    lengths: list[int]
    parents: list[int]
    places: list[np.ndarray]


def lay_out(sequences: Sequence[np.ndarray], groups: Sequence[int] | None) -> Layout:
    """The segments of a row of these sequences; `groups` is the group of each, None: nothing is shared."""
    places: list[np.ndarray] = [np.zeros(0, dtype=np.int64)] * len(sequences)
    ids, positions, lengths, parents, end = [], [], [], [], 0

    def add(tokens: np.ndarray, first: int, parent: int) -> np.ndarray:
        nonlocal end
        ids.append(tokens)
        positions.append(np.arange(first, first + len(tokens)))
        lengths.append(len(tokens))
        parents.append(parent)
        end += len(tokens)
        return np.arange(end - len(tokens), end)

    for members in _members(len(sequences), groups):
        prefix = shared_prefix([sequences[index] for index in members])
        parent, before = NO_PARENT, np.zeros(0, dtype=np.int64)
        if prefix:
            parent = len(lengths)
            before = add(sequences[members[0]][:prefix], 0, NO_PARENT)
        for index in members:
            places[index] = np.concatenate([before, add(sequences[index][prefix:], prefix, parent)])
    return Layout(np.concatenate(ids), np.concatenate(positions), lengths, parents, places)


def shared_prefix(sequences: Sequence[np.ndarray]) -> int:
    """How many tokens all sequences begin with, less than the shortest has; 0 for a single sequence."""
    if len(sequences) < 2:
        return 0
    first = sequences[0]
    prefix = min(map(len, sequences)) - 1
    for other in sequences[1:]:
        different = np.flatnonzero(first[:prefix] != other[:prefix])
        prefix = int(different[0]) if len(different) else prefix
    return prefix


def pack_groups(
    sequences: Sequence[np.ndarray], groups: Sequence[int] | None, *, rows: int, token_budget: int
) -> tuple[Plan, int]:
    """A plan in which every rank has a row, and how many one-token fillers behind the sequences that takes.

    `groups` None: as `pack`. Otherwise a group's sequences come together where that saves micro-batches, or else
    tokens. Raises PackingError as `pack` does, but never for too few sequences.
    """
    alone = [Piece((index,), 0, (len(sequence),)) for index, sequence in enumerate(sequences)]
    plans = [_pack_pieces(alone, len(sequences), rows, token_budget)]
    if groups is not None:
        whole = [piece_of(members, sequences, token_budget) for members in _members(len(sequences), groups)]
        for part in PIECES:
            pieces = [small for piece in whole for small in piece.split(token_budget // part)]
            pieces = _at_least(pieces, rows, token_budget)
            plans.append(_pack_pieces(pieces, len(sequences), rows, token_budget))
    best = min(plans, key=lambda plan: (len(plan.plan.micro_batches), plan.tokens))
    return best.plan, best.fillers


@dataclass(frozen=True, slots=True)
class Piece:
    """Sequences of one group that stay in one row; `rest` is what each has behind the `prefix` tokens of all."""

    members: tuple[int, ...]
    prefix: int
    rest: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.prefix + sum(self.rest)

    @property
    def work(self) -> int:
        """Σ L², less what the shared prefix saves."""
        shared = self.prefix * self.prefix
        return shared + sum((self.prefix + length) ** 2 - shared for length in self.rest)

    def part(self, chosen: Sequence[int]) -> Piece:
        """The piece of these of its members. One member shares with nobody."""
        members, rest = tuple(self.members[i] for i in chosen), tuple(self.rest[i] for i in chosen)
        return Piece(members, self.prefix, rest) if len(chosen) > 1 else Piece(members, 0, (self.prefix + rest[0],))

    def split(self, limit: int) -> list[Piece]:
        """Pieces, in order, of at most `limit` tokens each, unless one sequence alone has more."""
        chosen: list[list[int]] = []
        space = 0
        for index, length in enumerate(self.rest):
            if not chosen or length > space:
                chosen.append([])
                space = limit - self.prefix
            chosen[-1].append(index)
            space -= length
        return [self.part(indices) for indices in chosen]


def piece_of(members: Sequence[int], sequences: Sequence[np.ndarray], token_budget: int) -> Piece:
    """The members of a group as one piece. Those that fit no row are left to be reported: they share nothing."""
    prefix = shared_prefix([sequences[index] for index in members if len(sequences[index]) <= token_budget])
    prefix = min(prefix, *(len(sequences[index]) - 1 for index in members))
    return Piece(tuple(members), prefix, tuple(len(sequences[index]) - prefix for index in members))


@dataclass(frozen=True, slots=True)
class _Candidate:
    plan: Plan
    fillers: int
    tokens: int


def _pack_pieces(pieces: Sequence[Piece], sequences: int, rows: int, token_budget: int) -> _Candidate:
    """Pack pieces as if they were sequences, with fillers where they are too few, and name the sequences again."""
    tokens, work, fillers = [piece.tokens for piece in pieces], [piece.work for piece in pieces], 0
    try:
        plan = pack(tokens, rows=rows, token_budget=token_budget, work=work)
    except PackingError as error:
        if not error.missing:
            raise
        fillers = error.missing
        ones = [1] * fillers
        plan = pack([*tokens, *ones], rows=rows, token_budget=token_budget, work=[*work, *ones])
    members = [piece.members for piece in pieces] + [(sequences + number,) for number in range(fillers)]
    micro_batches = [
        [[index for piece in row for index in members[piece]] for row in micro_batch]
        for micro_batch in plan.micro_batches
    ]
    oversize = sorted(index for piece in plan.oversize for index in members[piece])
    return _Candidate(Plan(micro_batches, oversize), fillers, sum(tokens))


def _at_least(pieces: list[Piece], rows: int, token_budget: int) -> list[Piece]:
    """Halve the pieces with the most members until there are enough to fill the rows that the tokens need."""
    needed = -(-sum(piece.tokens for piece in pieces) // token_budget)
    wanted = -(-needed // rows) * rows
    while len(pieces) < wanted:
        place = max(range(len(pieces)), key=lambda index: len(pieces[index].members))
        size = len(pieces[place].members)
        if size == 1:
            break
        halves = [pieces[place].part(range(size // 2)), pieces[place].part(range(size // 2, size))]
        pieces = [*pieces[:place], *halves, *pieces[place + 1 :]]
    return pieces


def _members(count: int, groups: Sequence[int] | None) -> list[list[int]]:
    """The sequences of each group, groups in the order of their first; without groups, each sequence alone."""
    found: dict[int, list[int]] = {}
    for index, group in enumerate(range(count) if groups is None else groups):
        found.setdefault(group, []).append(index)
    return list(found.values())
