"""Turns become sequences by their tokens, and what the engine said of a token stays with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_core.rollout.reconcile import ReconcileError, Tally, reconcile
from grpo_core.trajectory import Turn, VersionSpan

CASES = json.loads((Path(__file__).parents[2] / "cases" / "reconcile.json").read_text())["cases"]


def turn(
    prompt: list[int], output: list[int], *, version: int = 1, spans: list[tuple[int, int, int]] | None = None
) -> Turn:
    """A turn whose log-probs are the negated token ids, sampled from one version unless spans say otherwise."""
    stated = spans if spans is not None else [(version, 0, len(output))] if output else []
    return Turn(
        prompt_ids=prompt,
        output_ids=output,
        logprobs=[-float(token) for token in output],
        spans=tuple(VersionSpan(1, number, start, end) for number, start, end in stated),
        finish_reason="stop",
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_documented_case(case: dict[str, Any]) -> None:
    options = {key: case[key] for key in ("fork_threshold_tokens",) if key in case}
    sequences, tally = reconcile([turn(*pair) for pair in case["turns"]], **options)
    assert [{"ids": row.ids, "mask": row.mask} for row in sequences] == case["rows"]
    assert tally.drift_max == case.get("drift_max", tally.drift_max)


def test_generated_tokens_keep_their_logprobs_and_context_has_none() -> None:
    (sequence,), tally = reconcile([turn([1, 2, 3], [10, 11]), turn([1, 2, 3, 10, 12], [30, 31])])
    assert sequence.logprobs == [0.0, 0.0, 0.0, -10.0, 0.0, -30.0, -31.0]
    assert tally == Tally(realign=1, drift_tokens=1, drift_max=1)
    assert sequence.prompt_length == 3


def test_spans_follow_their_tokens_and_lose_what_a_realign_replaces() -> None:
    first = turn([1, 2, 3], [10, 11, 12, 13], spans=[(4, 0, 1), (5, 1, 3), (6, 3, 4)])
    second = turn([1, 2, 3, 10, 11, 99, 98], [30, 31], version=7)
    (sequence,), _ = reconcile([first, second])
    assert sequence.ids == [1, 2, 3, 10, 11, 99, 98, 30, 31]
    assert [(span.version, span.start, span.end) for span in sequence.spans] == [(4, 3, 4), (5, 4, 5), (7, 7, 9)]


def test_sequence_that_forked_is_never_continued() -> None:
    turns = [turn([1, 2], [10]), turn([1, 9], [20]), turn([1, 2, 10, 3], [30])]
    sequences, tally = reconcile(turns)
    assert [sequence.ids for sequence in sequences] == [[1, 2, 10], [1, 9, 20], [1, 2, 10, 3, 30]]
    assert [sequence.prompt_length for sequence in sequences] == [2, 2, 4]
    assert tally == Tally(fork=2, drift_tokens=4, drift_max=2)


def test_no_turns_give_no_sequence() -> None:
    assert reconcile([]) == ([], Tally())


@pytest.mark.parametrize(
    ("logprobs", "spans", "named"),
    [
        ([-1.0], [(1, 0, 2)], "2 output tokens but 1 log-probs"),
        ([-1.0, float("nan")], [(1, 0, 2)], "log-prob nan at output token 1"),
        ([-1.0, float("-inf")], [(1, 0, 2)], "log-prob -inf at output token 1"),
        ([-1.0, -1.0], [(1, 0, 1)], "do not cover"),
        ([-1.0, -1.0], [(1, 0, 2), (2, 1, 2)], "do not cover"),
        ([-1.0, -1.0], [(1, 0, 2), (2, 2, 2)], "do not cover"),
    ],
)
def test_turn_that_contradicts_itself_is_refused(
    logprobs: list[float], spans: list[tuple[int, int, int]], named: str
) -> None:
    broken = Turn([1], [5, 6], logprobs, tuple(VersionSpan(1, *span) for span in spans), "stop")
    with pytest.raises(ReconcileError, match=f"turn 1 has .*{named}"):
        reconcile([turn([1], [7]), broken])


tokens = st.lists(st.integers(0, 2), max_size=6)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(tokens, tokens), max_size=5), st.integers(0, 4))
def test_every_trained_token_has_one_span_and_its_own_logprob(
    pairs: list[tuple[list[int], list[int]]], threshold: int
) -> None:
    turns = [turn(prompt, output, version=number) for number, (prompt, output) in enumerate(pairs)]
    sequences, tally = reconcile(turns, fork_threshold_tokens=threshold)
    assert tally.clean + tally.realign + tally.fork == max(len(pairs) - 1, 0)
    for sequence in sequences:
        assert len(sequence.ids) == len(sequence.mask) == len(sequence.logprobs)
        covered = [place for span in sequence.spans for place in range(span.start, span.end)]
        assert covered == [place for place, trained in enumerate(sequence.mask) if trained]
        assert all(sequence.logprobs[place] == -sequence.ids[place] for place in covered)
        assert not any(sequence.mask[: sequence.prompt_length])
    if turns and turns[-1].output_ids:
        conversation = turns[-1].prompt_ids + turns[-1].output_ids
        assert sequences[-1].ids == conversation
