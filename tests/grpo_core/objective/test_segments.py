"""Per-sequence sums do what a loop over sequences does."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_core.objective.segments import Segments


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=6))
def test_sums_means_and_sums_to_go_are_those_of_each_sequence(lengths: list[int]) -> None:
    segments = Segments(torch.tensor(lengths), sum(lengths))
    values = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(1))
    parts = values.split(lengths)
    torch.testing.assert_close(segments.sums(values), torch.stack([part.sum() for part in parts]))
    torch.testing.assert_close(segments.means(values), torch.stack([part.mean() for part in parts]))
    to_go = torch.cat([part.flip(0).cumsum(0).flip(0) for part in parts])
    torch.testing.assert_close(segments.to_go(values), to_go, rtol=1e-5, atol=1e-6)
    assert segments.spread(segments.sums(values)).shape == values.shape


def test_no_tokens_have_no_sums() -> None:
    assert Segments(torch.zeros(0, dtype=torch.int64), 0).sums(torch.zeros(0)).shape == (0,)
