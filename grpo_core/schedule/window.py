"""How far generation may run ahead of training.

Lag is a choice, made here (Little's law: mean lag = rollouts in flight and queued ÷ rollouts per step). Steps are
numbered from 1; step s trains with version (s − 1) // every_steps and, when a refit is due after it, makes the next.

Invariants:
  * capacity: an ordinal is leased only if some step within the window of the live version, and within the run, has
    room for its group; so nothing is generated that cannot be trained;
  * bound: the oldest version that a step may train on is `training version − max_age`;
  * the end: a run ends with `max_num_steps`, or with the last whole step that its data still fill. Ordinals dropped on
    the way are not replaced beyond the data, so each drop can bring that end nearer, and never moves it away.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from grpo_core.config import GRPOConfig, RefitConfig
from grpo_core.schedule.frontier import Frontier

Sampler = Literal["windowed", "in_order", "freshest"]
StalePolicy = Literal["mask", "drop", "wait"]


@dataclass(frozen=True, slots=True)
class Room:
    """How many groups may be leased; `target_step`: the step that they are bound to, if they are."""

    groups: int
    target_step: int | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """The settings of the schedule. `steps`: the most that the run makes; `prompts`: those of one epoch, None while the
    data have no known end; `epochs`: None without a limit; `refills`:
    useless groups that one step may have replaced."""

    prompts_per_step: int
    max_age: int
    every_steps: int
    steps: int
    prompts: int | None = None
    epochs: int | None = None
    sampler: Sampler = "windowed"
    stale_policy: StalePolicy = "mask"
    refills: int = 0

    @classmethod
    def of(cls, grpo: GRPOConfig, refit: RefitConfig, *, prompts: int | None) -> Window:
        """The window of a run over a dataset of `prompts`; None for a stream whose end is not known."""
        asynchronous = grpo.async_grpo
        batches = grpo.dynamic_sampling_max_gen_batches if grpo.use_dynamic_sampling else 0
        return cls(
            prompts_per_step=grpo.num_prompts_per_step,
            max_age=asynchronous.max_trajectory_age_steps,
            every_steps=refit.every_steps,
            steps=grpo.max_num_steps,
            prompts=prompts,
            epochs=grpo.max_num_epochs,
            sampler=asynchronous.sampler,
            stale_policy=asynchronous.stale_policy,
            refills=batches * grpo.num_prompts_per_step,
        )

    @property
    def ordinals(self) -> int | None:
        """How many ordinals the data have; None without a known end."""
        return None if self.prompts is None or self.epochs is None else self.epochs * self.prompts

    def training_version(self, step: int) -> int:
        """The version that step `step` trains with."""
        return (step - 1) // self.every_steps

    def refit_due(self, step: int) -> bool:
        """Whether step `step` ends with a new version."""
        return step % self.every_steps == 0

    def oldest_version(self, step: int) -> int:
        """The oldest version whose tokens step `step` may train on."""
        return max(0, self.training_version(step) - self.max_age)

    def latest_step(self, version: int) -> int:
        """The last step that may train tokens of this version."""
        return (version + self.max_age + 1) * self.every_steps

    def last_step(self, *, done: int = 0, settled: int = 0) -> int:
        """The last step of the run, as it looks after `done` steps with `settled` ordinals trained or dropped."""
        if self.ordinals is None:
            return self.steps
        return min(self.steps, done + max(0, self.ordinals - settled) // self.prompts_per_step)

    @property
    def most_open(self) -> int:
        """The most ordinals that can be open at once: all that the steps of a whole window train."""
        return (self.max_age + 1) * self.every_steps * self.prompts_per_step

    def horizon(self, *, live_version: int, done: int, settled: int) -> int:
        """The last step that may train what the live version generates."""
        return min(self.last_step(done=done, settled=settled), self.latest_step(live_version))

    def room(self, frontier: Frontier, *, live_version: int, done: int, limit: int) -> Room:
        """What the next lease may hold. `limit`: the most ordinals that are to be open, where they are not bound to
        steps."""
        counts = frontier.counts()
        if self.sampler == "in_order":
            bound = frontier.open_by_target()
            short = self.shortfalls(live_version=live_version, done=done, settled=counts.settled, bound=bound)
            target_step, missing = next(short, (None, 0))
            return Room(missing, target_step)
        capacity = self.capacity(
            live_version=live_version, done=done, settled=counts.settled, open_ordinals=counts.open
        )
        return Room(max(0, min(capacity, limit - counts.open)))

    def capacity(self, *, live_version: int, done: int, settled: int, open_ordinals: int) -> int:
        """How many more ordinals may be leased after `done` steps.

        `live_version` is the one that the whole pool has; `open_ordinals` are leased and neither trained nor dropped.
        """
        steps = self.horizon(live_version=live_version, done=done, settled=settled) - done
        return max(0, steps * self.prompts_per_step - open_ordinals)

    def shortfalls(
        self, *, live_version: int, done: int, settled: int, bound: Mapping[int, int]
    ) -> Iterator[tuple[int, int]]:
        """For `in_order`: each target step within reach that lacks groups, ascending, and how many it lacks.

        `bound` maps a target step to its open ordinals. So a run begins with max_age + 1 targets, each new version
        brings one more, and a target of which a group was dropped or lost in a restart is filled up first.
        """
        last = self.last_step(done=done, settled=settled)
        # Near the end of the data a drop can leave groups without a step of their own:
        # they serve the steps that are left.
        spare = sum(count for step, count in bound.items() if step > last)
        for step in range(done + 1, self.horizon(live_version=live_version, done=done, settled=settled) + 1):
            missing = self.prompts_per_step - bound.get(step, 0)
            served = min(spare, max(0, missing))
            spare -= served
            if missing > served:
                yield step, missing - served
