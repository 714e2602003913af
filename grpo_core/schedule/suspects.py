"""Ordinals that may be what kills the flow: tried apart from all others, in ever smaller groups.

A prompt can take its process down with it (a reward function that exhausts memory, say), and then nobody is left to
count its failures. What remains is that it was in flight when the flow died, every time. So many innocent ordinals were
too; who of them it was is found by trying a quarter of them at a time, with nothing else in flight: either they come to
something, or the flow dies again with only these to suspect. An ordinal that was alone, and has cost as many lives as a
rollout has attempts, is the culprit.

Invariant: a suspect is cleared by leaving the states returned and in flight; no other ordinal is leased before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# How many probes the suspects are divided into.
PROBES = 4


@dataclass(frozen=True, slots=True)
class Suspects:
    """`ordinals`: in flight at each of the last two deaths of the flow or more."""

    ordinals: frozenset[int] = frozenset()

    def among(self, ordinals: frozenset[int]) -> Suspects:
        """Those that are not cleared yet: `ordinals` are returned or in flight."""
        return Suspects(self.ordinals & ordinals)

    def next(self, *, returned: frozenset[int], in_flight: frozenset[int], count: int) -> tuple[int, ...] | None:
        """Up to `count` suspects to try now; none while a try is under way; None when there is nobody to suspect."""
        waiting = sorted(self.ordinals & returned)
        if not waiting and not self.ordinals & in_flight:
            return None
        if in_flight:
            return ()
        return tuple(waiting[: min(count, max(1, len(self.ordinals) // PROBES))])


@dataclass(frozen=True, slots=True)
class Verdict:
    """`suspects` are to be tried apart; `culprits` never again."""

    suspects: Suspects
    culprits: frozenset[int]


def judge(deaths: Sequence[frozenset[int]], *, lives: int) -> Verdict:
    """`deaths`: what was in flight at each death of the flow in a row, the newest first. `lives`: how many deaths make
    a suspect that was alone at the last of them a culprit."""
    if len(deaths) < 2:
        return Verdict(Suspects(), frozenset())
    suspected = deaths[0] & deaths[1]
    always = frozenset.intersection(*deaths[:lives])
    guilty = suspected & always if len(deaths) >= lives and len(deaths[0]) == 1 else frozenset()
    return Verdict(Suspects(suspected - guilty), guilty)
