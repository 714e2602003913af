"""Which groups a step trains, and what becomes of the others: a state machine over what the trainer has buffered.

Invariants:
  * bound: no token older than the window is admitted; lag is taken from the engine's own spans and is never negative;
  * whole groups; a step trains exactly `prompts_per_step` of them, or does not begin;
  * late binding: `windowed` takes the admissible groups with the oldest weights first, so that none goes stale while
    others are trained, `freshest` those with the newest; `in_order` takes the groups that were leased for this very
    step, or for one that the data do not reach any more. Ties go to the lowest ordinal, so the choice depends on
    nothing but what is buffered;
  * a step that cannot be filled is not waited for without end: what it may refill is bounded, and batch after batch
    without one admissible group ends the run with the most frequent cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from grpo_core.schedule.window import Window

FOREIGN, STALE, PAST_TARGET = "foreign version", "stale", "past target"
ZERO_VARIANCE = "zero_variance"
# The `failure` of a candidate that came back without its rollouts.
GENERATION_FAILED = "generation_failed"


class NothingAdmissible(RuntimeError):
    """Batch after batch had no group that could be trained; the message names the most frequent cause."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A buffered group as admission sees it. `failure`: why it can never be trained, or None; `foreign`: it has tokens
    of weights that are not of the living history, so that their version number means nothing here; `target_step`: the
    step that it was leased for, under `in_order`; `zero_variance`:
    no rollout did better or worse than another, so it teaches nothing."""

    ordinal: int
    oldest_version: int
    newest_version: int
    failure: str | None = None
    foreign: bool = False
    target_step: int | None = None
    zero_variance: bool = False


@dataclass(frozen=True, slots=True)
class Admission:
    """What step s does with the buffered groups: those it trains (none until it has enough), those that go back, those
    that end here, with the reason; groups named nowhere stay buffered. `admissible` counts what it could train now."""

    trained: tuple[int, ...]
    returned: Mapping[int, str]
    dropped: Mapping[int, str]
    admissible: int


@dataclass(slots=True)
class Admissions:
    """The decisions of one attempt, in their order.
    `hopeless_groups` in a row without an admissible one end the run."""

    window: Window
    hopeless_groups: int
    _step: int = 0
    _refilled: int = 0
    _started: bool = False
    _in_a_row: Counter[str] = field(default_factory=Counter)

    def decide(
        self,
        candidates: Iterable[Candidate],
        *,
        step: int,
        last_step: int,
        in_flight: Mapping[int, int] | None = None,
        bound: Mapping[int, int] | None = None,
    ) -> Admission:
        """Sort out the buffered groups for step `step`. Raise NothingAdmissible.

        `last_step`: the run's; `in_flight`: ordinals in flight by the version they were dispatched with; `bound`: open
        ordinals by target step. Whoever calls takes out of the next call what was decided in this one.
        """
        if step != self._step:
            self._step, self._refilled = step, 0
        admissible: list[Candidate] = []
        sound = False
        returned: dict[int, str] = {}
        dropped: dict[int, str] = {}
        for candidate in candidates:
            if candidate.failure is not None:
                dropped[candidate.ordinal] = candidate.failure
            elif (why := self._inadmissible(candidate, step)) is not None:
                returned[candidate.ordinal] = why
            elif candidate.zero_variance and self._refilled < self.window.refills:
                self._refilled += 1
                dropped[candidate.ordinal] = ZERO_VARIANCE
            else:
                sound = True
                if candidate.target_step in (None, step) or candidate.target_step > last_step:
                    admissible.append(candidate)
        self._note(sound, [*returned.values(), *dropped.values()], step)
        chosen, left = self._chosen(admissible)
        held_back = step < last_step and (
            self._overtakes(left, step, in_flight or {}) or self._too_early(step, bound or {})
        )
        trained = () if held_back else chosen
        self._started |= bool(trained)
        return Admission(trained, returned, dropped, len(admissible))

    def _inadmissible(self, candidate: Candidate, step: int) -> str | None:
        """Why a sound group cannot be trained as it is; its ordinal then goes back."""
        window, target = self.window, candidate.target_step
        if candidate.foreign or candidate.newest_version > window.training_version(step):
            return FOREIGN
        if target is not None and target < step:
            return PAST_TARGET
        oldest = window.oldest_version(step if target is None else target)
        partly = window.stale_policy != "mask" and candidate.oldest_version < oldest
        return STALE if candidate.newest_version < oldest or partly else None

    def _chosen(self, admissible: Sequence[Candidate]) -> tuple[tuple[int, ...], Sequence[Candidate]]:
        """The groups of a step, none unless there are enough, and those that are left."""
        count = self.window.prompts_per_step
        if len(admissible) < count:
            return (), admissible
        sign = -1 if self.window.sampler == "freshest" else 1
        # Under `in_order` the step's own groups come before those that have no step left.
        ordered = sorted(admissible, key=lambda each: (each.target_step or 0, sign * each.oldest_version, each.ordinal))
        return tuple(candidate.ordinal for candidate in ordered[:count]), ordered[count:]

    def _overtakes(self, left: Sequence[Candidate], step: int, in_flight: Mapping[int, int]) -> bool:
        """Whether what is left after this step, buffered or in flight, could not all be trained before it is stale.

        The test of earliest-deadline scheduling: for each step d, no more may have to be trained by then than the steps
        up to d have room for. Under `wait` a step that would break it is held back until older leases have come in.
        """
        window = self.window
        if window.stale_policy != "wait" or window.sampler == "in_order":
            return False
        due = Counter(window.latest_step(candidate.oldest_version) for candidate in left)
        for version, count in in_flight.items():
            due[window.latest_step(version)] += count
        demand = 0
        for latest in sorted(due):
            demand += due[latest]
            if demand > (latest - step) * window.prompts_per_step:
                return True
        return False

    def _too_early(self, step: int, bound: Mapping[int, int]) -> bool:
        """Under `in_order` the first step of an attempt waits until the next target is complete or claimed, so that its
        groups carry the version that they would have had without the restart."""
        first = self.window.sampler == "in_order" and not self._started and self.window.max_age > 0
        return first and bound.get(step + 1, 0) < self.window.prompts_per_step

    def _note(self, any_sound: bool, causes: Sequence[str], step: int) -> None:
        if any_sound:
            self._in_a_row.clear()
            return
        self._in_a_row.update(causes)
        if self._in_a_row.total() >= self.hopeless_groups:
            cause, count = self._in_a_row.most_common(1)[0]
            raise NothingAdmissible(
                f"step {step}: {self._in_a_row.total()} groups in a row could not be trained, {count} of them for the reason "
                f"'{cause}'; look at them with `forebay trace`, or raise grpo.async_grpo.max_batches_without_group"
            )
