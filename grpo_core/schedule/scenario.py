"""What is simulated: the plain data of a run on a virtual clock. Times are seconds, lengths tokens."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_core.schedule.pool_model import PoolModel
from grpo_core.schedule.workload import Workload


@dataclass(frozen=True, slots=True)
class TrainerModel:
    """A step of `prompts_per_step` groups lasts `step_seconds` and `seconds_per_token` for each token of them; every
    `every_steps` steps the pool is paused for `refit_seconds`, after its requests have ended if `drain`."""

    prompts_per_step: int
    step_seconds: float
    seconds_per_token: float = 0.0
    every_steps: int = 1
    refit_seconds: float = 0.0
    drain: bool = False
    save_period: int = 10


@dataclass(frozen=True, slots=True)
class FlowModel:
    """How groups are leased, scored and committed. A group that fails is tried up to `max_attempts` times."""

    lease_prompts: int = 1
    reward_seconds: float = 0.0
    flush_seconds: float = 0.0
    max_attempts: int = 3


@dataclass(frozen=True, slots=True)
class EngineDeath:
    """Engine number `engine` dies at `at` and is back, with the newest weights, `seconds` later."""

    at: float
    engine: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TrainerCrash:
    """The trainer dies at `at` and has resumed from its last checkpoint `seconds` later."""

    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run to simulate. `steps` are observed, whether or not the run ends with them; `max_age` is the window by which
    tokens are judged, whatever the rule makes of it."""

    workload: Workload
    pool: PoolModel
    trainer: TrainerModel
    steps: int
    max_age: int
    flow: FlowModel = FlowModel()
    faults: tuple[EngineDeath | TrainerCrash, ...] = ()

    @property
    def places(self) -> int:
        """Groups that the pool decodes at once."""
        return max(1, self.pool.engines * self.pool.slots // self.workload.group_size)
