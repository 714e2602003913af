"""The canary: after every refit each engine scores one fixed sequence, and the trainer's own log-probs decide.

It catches what answers 200 and is wrong all the same: a stale tied head, a missing tensor, uninitialised
memory, weights of another run. No digest can do that, since the engine fuses, slices and repacks the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CANARY_TOKENS = 64


class CanaryFailed(RuntimeError):
    """An engine computes with other weights than the trainer."""


@dataclass(frozen=True, slots=True)
class Canary:
    """`logprobs[i]` is the trainer's log-prob (nats, temperature 1) of `token_ids[i + 1]` given those before it.

    `tolerance` bounds the difference per nat (absolute up to one nat): in float32 1e-4, in lower precision a few times
    the difference that a correct engine shows (`RunConfig.canary_tolerance`).
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tolerance: float

    def __post_init__(self) -> None:
        if len(self.logprobs) != len(self.token_ids) - 1:
            raise ValueError(
                f"a canary of {len(self.token_ids)} tokens needs {len(self.token_ids) - 1} log-probs, "
                f"not {len(self.logprobs)}; give one for each token after the first"
            )

    def thinned(self, most: int) -> list[int]:
        """At most so many indices of `logprobs`, spread evenly; the last one, which sees most text, is among them."""
        count = min(most, len(self.logprobs))
        return [len(self.logprobs) * (number + 1) // count - 1 for number in range(count)]


def canary_tokens(prompts: Iterable[Sequence[int]], context: int) -> tuple[int, ...]:
    """The first tokens of a run's prompts, one after the other. One position of the context is left, for the token an
    engine must sample.

    Text the policy knows, because a sharpened policy puts random tokens at −40 nats and lower, where float32 itself is
    off by more than a canary may be.
    """
    wanted = min(CANARY_TOKENS, context - 1)
    tokens: list[int] = []
    for prompt in prompts:
        tokens += prompt
        if len(tokens) >= wanted:
            break
    if len(tokens) < 2:
        raise ValueError(f"the canary needs two tokens of prompts, there are {len(tokens)}; give the run a prompt")
    return tuple(tokens[:wanted])


def check_canary(engine: str, canary: Canary, scores: Sequence[float], places: Sequence[int] | None = None) -> float:
    """The largest absolute difference (nats) to the trainer; CanaryFailed above the tolerance or on NaN. `scores` are
    of all of `canary.logprobs`, or of those at `places`."""
    expected = canary.logprobs if places is None else [canary.logprobs[place] for place in places]
    if len(scores) != len(expected):
        raise CanaryFailed(f"engine {engine} scored {len(scores)} of {len(expected)} canary tokens; replace it")
    differences = [abs(theirs - ours) for theirs, ours in zip(scores, expected, strict=True)]
    largest = math.nan if any(math.isnan(difference) for difference in differences) else max(differences)
    # A float's error grows with its size, so a token at −20 nats may differ twenty times as much as one at −1.
    allowed = [canary.tolerance * max(1.0, -logprob) for logprob in expected]
    if not all(difference <= bound for difference, bound in zip(differences, allowed, strict=True)):
        raise CanaryFailed(
            f"engine {engine} differs from the trainer by {largest:.3g} nats on the canary (tolerance "
            f"{canary.tolerance:g}): its weights are not the trainer's; replace it"
        )
    return largest
