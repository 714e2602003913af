"""Sequences of a group share the prefix that they have in common,
and rows that are planned fit when they are laid out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_core.training.attention import NO_PARENT
from grpo_core.training.packing import PackingError, Plan
from grpo_core.training.sharing import Piece, lay_out, pack_groups, shared_prefix


def sequences(*texts: str) -> list[np.ndarray]:
    return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) for text in texts]


def text(ids: np.ndarray) -> str:
    return bytes(ids.astype(np.uint8)).decode()


def test_a_row_holds_each_shared_prefix_once() -> None:
    row = sequences("question: yes", "other", "question: no!", "question: yesterday")
    layout = lay_out(row, [4, 5, 4, 4])
    assert text(layout.ids) == "question: yesno!yesterdayother"
    assert layout.lengths == [10, 3, 3, 9, 5]
    assert layout.parents == [NO_PARENT, 0, 0, 0, NO_PARENT]
    for sequence, places in zip(row, layout.places, strict=True):
        assert layout.ids[places].tolist() == sequence.tolist()
        assert layout.positions[places].tolist() == list(range(len(sequence)))


def test_without_groups_nothing_is_shared() -> None:
    layout = lay_out(sequences("same", "same"), None)
    assert (text(layout.ids), layout.parents) == ("samesame", [NO_PARENT, NO_PARENT])


def test_equal_sequences_keep_a_token_of_their_own() -> None:
    assert lay_out(sequences("same", "same"), [0, 0]).lengths == [3, 1, 1]


@pytest.mark.parametrize(
    ("texts", "prefix"),
    [
        ((), 0),
        (("ab",), 0),
        (("ab", "cd"), 0),
        (("abc", "abd"), 2),
        (("abc", "abcd"), 2),
        (("abcd", "abce", "axxx"), 1),
    ],
)
def test_what_sequences_have_in_common(texts: tuple[str, ...], prefix: int) -> None:
    assert shared_prefix(sequences(*texts)) == prefix


def test_a_group_stays_together_where_that_saves_a_micro_batch() -> None:
    group = sequences(*("p" * 30 + letter * 10 for letter in "abcd"))
    together, _ = pack_groups(group, [0] * 4, rows=1, token_budget=70)
    assert together == Plan([[[0, 1, 2, 3]]], [])
    alone, _ = pack_groups(group, None, rows=1, token_budget=70)
    assert len(alone.micro_batches) == 4


def test_a_group_too_large_for_a_row_is_cut_into_pieces() -> None:
    group = sequences(*("p" * 30 + letter * 10 for letter in "abcdef"))
    plan, _ = pack_groups(group, [0] * 6, rows=1, token_budget=60)
    assert [len(row) for micro_batch in plan.micro_batches for row in micro_batch] == [3, 3]


def test_a_group_is_cut_so_that_every_rank_has_a_row() -> None:
    plan, fillers = pack_groups(sequences("pa", "pb", "pc", "pd"), [0] * 4, rows=4, token_budget=100)
    assert fillers == 0
    assert sorted(map(len, plan.micro_batches[0])) == [1, 1, 1, 1]


def test_members_that_fit_no_row_are_reported_and_the_others_are_packed() -> None:
    group = sequences("pa", "p" * 20, "pb")
    plan, _ = pack_groups(group, [0] * 3, rows=1, token_budget=10)
    assert plan.oversize == [1]
    assert sorted(plan.micro_batches[0][0]) == [0, 2]


@pytest.mark.parametrize(
    ("lengths", "rows", "fillers"), [([5], 3, 2), ([5, 5], 2, 0), ([9, 9, 9], 2, 1), ([5, 4], 1, 0)]
)
def test_every_rank_has_a_row_in_every_micro_batch(lengths: list[int], rows: int, fillers: int) -> None:
    plan, added = pack_groups([np.zeros(length) for length in lengths], None, rows=rows, token_budget=10)
    assert added == fillers
    indices = sorted(index for micro_batch in plan.micro_batches for row in micro_batch for index in row)
    assert indices == list(range(len(lengths) + fillers))
    assert all(len(micro_batch) == rows and all(micro_batch) for micro_batch in plan.micro_batches)


def test_packing_that_fillers_cannot_help_is_refused() -> None:
    with pytest.raises(PackingError):
        pack_groups([np.zeros(3), np.zeros(0)], None, rows=1, token_budget=10)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 30)), min_size=1, max_size=30),
    st.integers(1, 4),
    st.integers(12, 60),
)
def test_every_planned_row_fits_when_it_is_laid_out(drawn: list[tuple[int, int]], rows: int, token_budget: int) -> None:
    """Members of group g begin with 3 g tokens of their group."""
    groups = [group for group, _ in drawn]
    row = [
        np.concatenate([np.full(3 * group, group), 100 + number + np.arange(length)])
        for number, (group, length) in enumerate(drawn)
    ]
    plan, fillers = pack_groups(row, groups, rows=rows, token_budget=token_budget)
    row += [np.zeros(1, dtype=np.int64)] * fillers
    groups += [1000 + number for number in range(fillers)]
    placed = [index for micro_batch in plan.micro_batches for part in micro_batch for index in part]
    assert sorted(placed + plan.oversize) == list(range(len(row)))
    assert plan.oversize == [index for index, sequence in enumerate(row) if len(sequence) > token_budget]
    for micro_batch in plan.micro_batches:
        assert len(micro_batch) == rows
        for part in micro_batch:
            layout = lay_out([row[index] for index in part], [groups[index] for index in part])
            assert 0 < len(layout.ids) <= token_budget
            for index, places in zip(part, layout.places, strict=True):
                assert layout.ids[places].tolist() == row[index].tolist()


def test_work_of_a_piece_is_that_of_its_sequences_less_the_shared_squares() -> None:
    piece = Piece((0, 1), 3, (1, 2))
    assert piece.tokens == 6
    assert piece.work == 4 * 4 + 5 * 5 - 3 * 3
    assert Piece((0,), 0, (7,)).work == 49
