"""What becomes of a reward before it is compared: pure functions of arrays of one shape, [groups, members].

Contract: NaN, which says that there is no score, stays NaN; nothing here makes a score of it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from grpo_core.objective.advantages import Floats


def scaled(rewards: npt.ArrayLike, *, source: tuple[float, float], target: tuple[float, float]) -> Floats:
    """Clamp rewards to the interval `source` and map it linearly onto `target`."""
    low, high = source
    share = (np.clip(np.asarray(rewards, dtype=np.float64), low, high) - low) / (high - low)
    return target[0] + share * (target[1] - target[0])


def overlong_penalty(lengths: npt.ArrayLike, *, longest: int, buffer: int, penalty: float) -> Floats:
    """What is added to the reward of a rollout of `lengths` generated tokens: 0 up to longest - buffer, then falling
    linearly to -penalty at `longest`, and no further behind it (DAPO, Yu et al. 2025, equation 13)."""
    excess = np.asarray(lengths, dtype=np.float64) - (longest - buffer)
    return -penalty * np.clip(excess / buffer, 0.0, 1.0)


def discounted(rewards: npt.ArrayLike, truncated: npt.ArrayLike, coefficient: float) -> Floats:
    """Rewards above 0 of truncated rollouts times `coefficient`; one below 0 would gain by that, and stays."""
    values = np.asarray(rewards, dtype=np.float64)
    return np.where(np.asarray(truncated, dtype=bool) & (values > 0), coefficient * values, values)
