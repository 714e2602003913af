"""How far generation may run ahead, and which groups a step trains.

Lag is a choice, made here (Little's law: mean lag = rollouts in flight and queued ÷ rollouts per step). Steps are
numbered from 1; step s trains with version (s − 1) // every_steps and, when a refit is due after it, makes the next.

Invariants:
  * capacity: an ordinal is leased only if some step within the window of the live version, and within the run, has
    room for its group; so nothing is generated that cannot be trained;
  * bound: no token older than `training version − max_age` is admitted; lag is taken from the engine's own spans and
    is never negative;
  * whole groups, oldest first: a step trains the admissible groups with the oldest weights, then the lowest ordinal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from grpo_core.config import GRPOConfig, RefitConfig


@dataclass(frozen=True, slots=True)
class Window:
    """The settings of the schedule; `steps` is the number of the run's last step."""

    prompts_per_step: int
    max_age: int
    every_steps: int
    steps: int
    stale_policy: Literal["mask", "drop"]

    @classmethod
    def of(cls, grpo: GRPOConfig, refit: RefitConfig, *, steps: int) -> Window:
        """The window of a run config that ends with step `steps`."""
        return cls(
            prompts_per_step=grpo.num_prompts_per_step,
            max_age=grpo.async_grpo.max_trajectory_age_steps,
            every_steps=refit.every_steps,
            steps=steps,
            stale_policy=grpo.async_grpo.stale_policy,
        )

    def training_version(self, step: int) -> int:
        """The version that step `step` trains with."""
        return (step - 1) // self.every_steps

    def refit_due(self, step: int) -> bool:
        """Whether step `step` ends with a new version."""
        return step % self.every_steps == 0

    def oldest_version(self, step: int) -> int:
        """The oldest version whose tokens step `step` may train on."""
        return max(0, self.training_version(step) - self.max_age)

    def capacity(self, *, live_version: int, steps_done: int, open_ordinals: int) -> int:
        """How many more ordinals may be leased.

        `live_version` is the one that the whole pool has; `open_ordinals` are leased and neither trained nor dropped.
        """
        last_step = min(self.steps, (live_version + self.max_age + 1) * self.every_steps)
        return max(0, (last_step - steps_done) * self.prompts_per_step - open_ordinals)

    def admit(self, candidates: Iterable[Candidate], *, step: int) -> Admission:
        """Sort out the buffered groups for step `step`: which it trains (none until it has enough), which go back."""
        oldest = self.oldest_version(step)
        admissible, returned, dropped = [], {}, {}
        for candidate in candidates:
            if candidate.failure is not None:
                dropped[candidate.ordinal] = candidate.failure
            elif candidate.foreign or candidate.newest_version > self.training_version(step):
                returned[candidate.ordinal] = "foreign version"
            elif candidate.newest_version < oldest or (
                self.stale_policy == "drop" and candidate.oldest_version < oldest
            ):
                returned[candidate.ordinal] = "stale"
            else:
                admissible.append(candidate)
        admissible.sort(key=lambda candidate: (candidate.oldest_version, candidate.ordinal))
        enough = len(admissible) >= self.prompts_per_step
        trained = tuple(candidate.ordinal for candidate in admissible[: self.prompts_per_step]) if enough else ()
        return Admission(trained, returned, dropped)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A buffered group as admission sees it. `failure`: why it can never be trained, or None; `foreign`: it has tokens
    of weights that are not of the living history, so that their version number means nothing here."""

    ordinal: int
    oldest_version: int
    newest_version: int
    failure: str | None = None
    foreign: bool = False


@dataclass(frozen=True, slots=True)
class Admission:
    """What step s does with the buffered groups; groups named nowhere stay buffered."""

    trained: tuple[int, ...]
    returned: dict[int, str]
    dropped: dict[int, str]


def last_step(grpo: GRPOConfig, *, prompts: int) -> int:
    """The number of the run's last step. An incomplete last batch of the last epoch is not trained."""
    if grpo.max_num_epochs is None:
        return grpo.max_num_steps
    return min(grpo.max_num_steps, grpo.max_num_epochs * prompts // grpo.num_prompts_per_step)
