"""What a simulated run came to, and how it is counted.

`efficiency` is ideal ÷ wall, with the time of a schedule that lets neither side wait:

    ideal = max(tokens that were of use ÷ speed of the full pool, first fill + seconds of all steps) + all refits

The first fill is the time until one step's groups are made, if the pool begins with as many groups as it has places
for. Tokens are of use unless their group was thrown away: those still in flight when the observation ends count, as
they will be trained.

`wasted_fraction` is the share of the generated tokens whose group was thrown away: stale, failed, or lost in a crash.
Apart from it, `masked_fraction` is the share of the tokens of trained groups that were older than the window and got no
gradient. Lag is that of single tokens, over those with a gradient; `age` is that of a group's oldest token.
`length_ratio` is the mean length of the trained rollouts over that of the law they are drawn from: 1 is no bias, less
means that long ones are lost or still in flight. `over_window` is the share of the trained groups with a token that
got a gradient although it was older than the window.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_core.schedule.frontier import Counts
from grpo_core.schedule.pool_model import Group
from grpo_core.schedule.scenario import Scenario
from grpo_core.schedule.workload import Draws


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One ledgered step: the version it trained with, the seconds it took, and its groups."""

    step: int
    version: int
    seconds: float
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Lag:
    """Versions between a token and the step that trained it, over all tokens with a gradient."""

    mean: float
    p95: int
    max: int

    @classmethod
    def of(cls, tokens: Mapping[int, float]) -> Lag:
        """`tokens` maps a lag to how many tokens had it."""
        total = math.fsum(tokens.values())
        if not total:
            return cls(0.0, 0, 0)
        mean = math.fsum(lag * count for lag, count in tokens.items()) / total
        seen, p95 = 0.0, 0
        for lag, count in sorted(tokens.items()):
            seen, p95 = seen + count, lag
            if seen >= 0.95 * total:
                break
        return cls(mean, p95, max(tokens))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of a run; shares are of 1. `trainer` and `pool` are utilisations: the share of the time in which the
    trainer was in a step, and the share of the tokens that a full pool would have made. `wasted_groups` counts
    attempts."""

    steps: int
    wall_seconds: float
    efficiency: float
    trainer: float
    pool: float
    lag: Lag
    age_mean: float
    wasted_fraction: float
    wasted_groups: int
    masked_fraction: float
    over_window: float
    length_ratio: float
    counts: Counts

    @property
    def steps_per_hour(self) -> float:
        return 3600 * self.steps / self.wall_seconds

    def to_json(self) -> dict[str, Any]:
        """The figures under the names of the public contract of `forebay plan`."""
        return {
            "utilisation": {"trainer": self.trainer, "pool": self.pool},
            "efficiency": self.efficiency,
            "lag": {"mean": self.lag.mean, "p95": self.lag.p95, "max": self.lag.max},
            "wasted_fraction": self.wasted_fraction,
            "masked_fraction": self.masked_fraction,
            "length_ratio": self.length_ratio,
            "steps_per_hour": self.steps_per_hour,
        }


def first_fill(scenario: Scenario) -> float:
    """Seconds until one step's groups are made, when the pool begins with as many as it has places for."""
    draws, needed = Draws(scenario.workload), scenario.trainer.prompts_per_step
    longest = sorted(max(draws.draw(ordinal, 0).tokens) for ordinal in range(max(scenario.places, needed)))
    return longest[needed - 1] / scenario.pool.tokens_per_second


def measure(
    scenario: Scenario,
    records: Sequence[StepRecord],
    *,
    masks: bool,
    wall: float,
    generated: float,
    wasted_tokens: float,
    wasted_groups: int,
    counts: Counts,
) -> Outcome:
    """The outcome of the steps in `records`. `masks`: tokens beyond the window got no gradient."""
    lags: defaultdict[int, float] = defaultdict(float)
    tokens, masked, rollouts, ages, groups, over = 0.0, 0.0, 0, 0, 0, 0
    for record in records:
        for group in record.groups:
            groups += 1
            rollouts += len(group.lengths)
            age = record.version - group.oldest_version
            ages += age
            over += age > scenario.max_age and not masks
            for version, count in group.tokens.items():
                tokens += count
                if masks and record.version - version > scenario.max_age:
                    masked += count
                else:
                    lags[record.version - version] += count
    law = scenario.workload.lengths.mean
    seconds = math.fsum(record.seconds for record in records)
    refits = len(records) // scenario.trainer.every_steps * scenario.trainer.refit_seconds
    peak = scenario.pool.peak
    ideal = max((generated - wasted_tokens) / peak, first_fill(scenario) + seconds) + refits
    return Outcome(
        steps=len(records),
        wall_seconds=wall,
        efficiency=ideal / wall,
        trainer=seconds / wall,
        pool=generated / (peak * wall),
        lag=Lag.of(lags),
        age_mean=ages / max(1, groups),
        wasted_fraction=wasted_tokens / generated if generated else 0.0,
        wasted_groups=wasted_groups,
        masked_fraction=masked / tokens if tokens else 0.0,
        over_window=over / max(1, groups),
        length_ratio=tokens / rollouts / law if rollouts else 0.0,
        counts=counts,
    )
