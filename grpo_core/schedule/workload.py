"""What a simulated run generates: how long each rollout is, and which groups come to nothing.

Every draw is a pure function of (seed, ordinal, attempt), so each rule of the simulator meets the same rollouts, a
group that is generated again is drawn again, and a simulation can be repeated to the last token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Protocol

import numpy as np

# Ordinals are drawn in blocks: making a generator costs more than a thousand draws.
BLOCK = 1024


class Lengths(Protocol):
    """A law of completion lengths, in tokens."""

    @property
    def mean(self) -> float:
        """Expected tokens of a rollout."""

    def draw(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Lengths [shape], float, each at least one token."""


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal lengths whose mean before the cut is `mean_tokens`; `sigma` is the spread of the logarithm, 0 makes
    all rollouts equal. Longer ones are cut at `limit`, as by `generation.max_completion_length`."""

    mean_tokens: float
    sigma: float
    limit: float = math.inf

    @property
    def mean(self) -> float:
        """Of the lengths as they are drawn, between one token and the limit."""
        if self.sigma == 0:
            return min(max(self.mean_tokens, 1.0), self.limit)
        cut_below = self._below(1.0)
        whole = self.mean_tokens * (self._below(self.limit, weighted=True) - self._below(1.0, weighted=True))
        cut_above = 0.0 if math.isinf(self.limit) else self.limit * (1 - self._below(self.limit))
        return cut_below + whole + cut_above

    def _below(self, tokens: float, *, weighted: bool = False) -> float:
        """Share of the rollouts, or if `weighted` of their tokens, that are in rollouts shorter than this."""
        if math.isinf(tokens):
            return 1.0
        location = math.log(self.mean_tokens) + self.sigma**2 * (0.5 if weighted else -0.5)
        return NormalDist(location, self.sigma).cdf(math.log(tokens))

    def draw(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        location = math.log(self.mean_tokens) - self.sigma**2 / 2
        return np.clip(generator.lognormal(location, self.sigma, shape), 1.0, self.limit)


@dataclass(frozen=True, slots=True)
class Observed:
    """Lengths drawn from those of a real run, in tokens."""

    tokens: tuple[float, ...]

    @property
    def mean(self) -> float:
        return math.fsum(self.tokens) / len(self.tokens)

    def draw(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return np.maximum(generator.choice(self.tokens, shape), 1.0)


@dataclass(frozen=True, slots=True)
class Workload:
    """The prompts of a simulated run. `failure_rate`: share of the attempts at a group that fail after all their
    tokens were generated; `zero_variance_rate`: share of the groups whose rewards are all equal."""

    lengths: Lengths
    group_size: int = 1
    failure_rate: float = 0.0
    zero_variance_rate: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Drawn:
    """One attempt at one group: the tokens of each member, and what becomes of it."""

    tokens: tuple[float, ...]
    fails: bool
    zero_variance: bool


@dataclass(slots=True)
class Draws:
    """The draws of a workload; remembers the blocks in use."""

    workload: Workload
    _blocks: dict[tuple[int, int], tuple[list[list[float]], list[list[float]]]] = field(default_factory=dict)

    def draw(self, ordinal: int, attempt: int) -> Drawn:
        """Attempt `attempt`, counted from 0, at the group of `ordinal`."""
        key = (ordinal // BLOCK, attempt)
        if key not in self._blocks:
            self._blocks[key] = self._block(*key)
        lengths, chances = self._blocks[key]
        row = ordinal % BLOCK
        fails, zero_variance = chances[row]
        return Drawn(
            tuple(lengths[row]), fails < self.workload.failure_rate, zero_variance < self.workload.zero_variance_rate
        )

    def _block(self, block: int, attempt: int) -> tuple[list[list[float]], list[list[float]]]:
        generator = np.random.default_rng([self.workload.seed, block, attempt])
        lengths = self.workload.lengths.draw(generator, (BLOCK, self.workload.group_size))
        return lengths.tolist(), generator.random((BLOCK, 2)).tolist()
