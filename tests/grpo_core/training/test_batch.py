"""A batch predicts generated tokens only, and masks exactly the stale ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from grpo_core.training.batch import Batch, Row
from grpo_core.trajectory import VersionSpan


def row(length: int, prompt: int, *spans: tuple[int, int, int]) -> Row:
    generated = np.arange(length) >= prompt
    return Row(
        np.arange(length, dtype=np.int32) + 10 * length,
        generated,
        np.where(generated, -np.arange(length, dtype=np.float32), 0.0).astype(np.float32),
        tuple(VersionSpan(1, *span) for span in spans),
    )


ROWS = [row(5, 2, (3, 2, 4), (4, 4, 5)), row(3, 1, (2, 1, 3)), row(4, 3, (4, 3, 4))]


def batch(*rows: Row, oldest: int = 0) -> Batch:
    return Batch.of(rows, [1.0, -2.0, 0.5][: len(rows)], oldest_version=oldest, device=torch.device("cpu"))


def lists(made: Batch, *names: str) -> list[Any]:
    return [getattr(made, name).tolist() for name in names]


def test_positions_restart_and_each_target_follows_its_input() -> None:
    made = batch(*ROWS)
    ids, positions = lists(made, "input_ids", "position_ids")
    assert positions == [[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]]
    at, targets = lists(made, "at", "targets")
    assert at == [1, 2, 3, 5, 6, 10]
    assert targets == [ids[0][place + 1] for place in at] == [52, 53, 54, 31, 32, 43]
    assert lists(made, "behaviour_logprobs", "advantages", "sequence_ids") == [
        [-2.0, -3.0, -4.0, -1.0, -2.0, -3.0],
        [1.0, 1.0, 1.0, -2.0, -2.0, 0.5],
        [0, 0, 0, 1, 1, 2],
    ]


def test_only_stale_tokens_lose_their_gradient() -> None:
    assert batch(*ROWS, oldest=2).mask.tolist() == [True] * 6
    assert batch(*ROWS, oldest=4).mask.tolist() == [False, False, True, False, False, True]
    assert batch(*ROWS, oldest=5).mask.tolist() == [False] * 6


def test_a_stale_token_stays_in_the_input() -> None:
    assert batch(*ROWS, oldest=5).input_ids.shape == batch(*ROWS).input_ids.shape


def test_a_span_over_tokens_that_were_not_generated_trains_none_of_them() -> None:
    assert row(4, 3, (9, 0, 4)).fresh(0).tolist() == [False, False, False, True]


def test_a_first_token_that_was_generated_is_predicted_by_nothing() -> None:
    whole = row(3, 0, (4, 0, 3))
    assert whole.fresh(0).tolist() == [False, True, True]
    assert int(batch(whole).mask.sum()) == int(whole.fresh(0).sum())
    assert not row(1, 0, (4, 0, 1)).fresh(0).any()


def test_a_row_without_generated_tokens_predicts_nothing() -> None:
    made = batch(row(1, 1))
    assert made.input_ids.shape == (1, 1)
    assert [getattr(made, name).numel() for name in ("at", "targets", "mask", "advantages", "sequence_ids")] == [0] * 5
