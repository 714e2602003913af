"""Turns of one conversation become as few training sequences as their tokens allow.

Every turn's prompt is the whole conversation rendered again, so it should begin with the tokens held so far. It may
not: a chat template can rewrite what the model wrote. Tokens decide, never text. With matched = length of the common
prefix of the held tokens and the prompt, and drift = held tokens beyond it:

    CLEAN    drift = 0: the rest of the prompt is appended as context.
    REALIGN  the drift lies within the last answer and is below the threshold: the prompt replaces the tail.
    FORK     otherwise: a new sequence starts; earlier ones are finished and never continued.

Invariants: every generated token that stays in `ids` keeps its log-prob, its mask 1 and the version span the engine
stated for it; replaced tokens and context have mask 0, log-prob 0 and no span; a sequence without a generated token
is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from grpo_core.trajectory import Sequence, Turn, VersionSpan


class ReconcileError(ValueError):
    """A turn whose log-probs or version spans do not belong to its output."""


@dataclass(frozen=True, slots=True)
class Tally:
    """How the turns after the first joined on. `drift_tokens` and `drift_max` are over all of them, forks included."""

    clean: int = 0
    realign: int = 0
    fork: int = 0
    drift_tokens: int = 0
    drift_max: int = 0


@dataclass(slots=True)
class _Draft:
    """A sequence being built. `answer_start` is the offset of the last turn's output."""

    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    prompt_length: int
    answer_start: int = 0
    spans: list[VersionSpan] = field(default_factory=list)

    @classmethod
    def from_prompt(cls, prompt_ids: list[int]) -> _Draft:
        draft = cls([], [], [], prompt_length=len(prompt_ids))
        draft.append_context(prompt_ids)
        return draft

    def append_context(self, ids: list[int]) -> None:
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def append_output(self, turn: Turn) -> None:
        self.answer_start = len(self.ids)
        self.ids += turn.output_ids
        self.mask += [1] * len(turn.output_ids)
        self.logprobs += turn.logprobs
        self.spans += [
            replace(span, start=span.start + self.answer_start, end=span.end + self.answer_start) for span in turn.spans
        ]

    def truncate(self, length: int) -> None:
        del self.ids[length:], self.mask[length:], self.logprobs[length:]
        self.spans = [replace(span, end=min(span.end, length)) for span in self.spans if span.start < length]

    def finish(self) -> Sequence:
        return Sequence(self.ids, self.mask, self.logprobs, tuple(self.spans), self.prompt_length)


def reconcile(turns: SequenceOf[Turn], *, fork_threshold_tokens: int = 1024) -> tuple[list[Sequence], Tally]:
    """Return the trainable sequences of one rollout, in order, and how its turns joined.

    A drift of exactly `fork_threshold_tokens` forks. Raises ReconcileError for a turn whose log-probs are missing or
    not finite, or whose spans, where it has any, do not cover its output exactly once.
    """
    drafts: list[_Draft] = []
    clean = realign = fork = 0
    drifts = [0]
    for number, turn in enumerate(turns):
        _check_turn(turn, number)
        if not drafts:
            drafts.append(_Draft.from_prompt(turn.prompt_ids))
        else:
            held = drafts[-1]
            matched = _common_prefix(held.ids, turn.prompt_ids)
            drift = len(held.ids) - matched
            drifts.append(drift)
            if drift == 0:
                clean += 1
                held.append_context(turn.prompt_ids[matched:])
            elif matched >= held.answer_start and drift < fork_threshold_tokens:
                realign += 1
                held.truncate(matched)
                held.append_context(turn.prompt_ids[matched:])
            else:
                fork += 1
                drafts.append(_Draft.from_prompt(turn.prompt_ids))
        drafts[-1].append_output(turn)
    sequences = [draft.finish() for draft in drafts if any(draft.mask)]
    return sequences, Tally(clean, realign, fork, sum(drifts), max(drifts))


def _common_prefix(left: list[int], right: list[int]) -> int:
    """Length of the common prefix. List comparison runs in C, so halving beats a Python loop over tokens."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _check_turn(turn: Turn, number: int) -> None:
    length = len(turn.output_ids)
    if len(turn.logprobs) != length:
        raise ReconcileError(
            f"turn {number} has {length} output tokens but {len(turn.logprobs)} log-probs: ask the engine for all"
        )
    for offset, logprob in enumerate(turn.logprobs):
        if not math.isfinite(logprob):
            raise ReconcileError(
                f"turn {number} has the log-prob {logprob} at output token {offset}: generate the turn again"
            )
    if turn.spans:
        ends = [0, *(span.end for span in turn.spans)]
        starts = [*(span.start for span in turn.spans), length]
        if starts != ends or any(span.start >= span.end for span in turn.spans):
            raise ReconcileError(
                f"turn {number} has version spans {[(span.start, span.end) for span in turn.spans]} that do not cover "
                f"its {length} output tokens exactly once: generate the turn again"
            )
