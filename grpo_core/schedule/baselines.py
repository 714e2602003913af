"""How other systems schedule, as rules for the simulator, to compare ours with.

Each is the rule of one or more systems reduced to what decides throughput, lag and waste: whole groups, one version per
step, and generation in places whose number is the pool's own, the setting that serves each of them best. Names of the
systems are those of the versions studied in 2026. In all of them a group's version is the one at its dispatch, and
every token of an admitted group is trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from grpo_core.schedule.admission import GENERATION_FAILED, STALE, Admission
from grpo_core.schedule.pool_model import Group
from grpo_core.schedule.rules import Board, Rule
from grpo_core.schedule.window import Room


@dataclass(frozen=True, slots=True)
class ExactTarget:
    """NeMo RL: a group is generated for one step, `max_age` steps ahead, and only that step trains it. So it waits for
    its own slowest group, and lag is as high as the window whatever the supply."""

    prompts_per_step: int
    max_age: int
    masks: ClassVar[bool] = False

    def room(self, board: Board) -> Room:
        bound = Counter(board.frontier.target_steps.values())
        for step in range(board.step, board.live_version + self.max_age + 2):
            if bound[step] < self.prompts_per_step:
                return Room(self.prompts_per_step - bound[step], step)
        return Room(0)

    def admit(self, board: Board) -> Admission:
        targets = board.frontier.target_steps
        due = [group for group in _sound(board) if targets[group.ordinal] == board.step]
        return _admission(board, due, self.prompts_per_step)


@dataclass(frozen=True, slots=True)
class DropAtPull:
    """TRL: first in, first out, from a buffer of `buffer_groups`; a group that is too old when the trainer pulls it is
    dropped there and then. The buffer's size has nothing to do with the window, so a fast pool fills it with groups
    that will all be too old."""

    prompts_per_step: int
    max_age: int
    buffer_groups: int = 1024
    masks: ClassVar[bool] = False

    def room(self, board: Board) -> Room:
        return Room(board.places - len(board.in_flight) if len(board.buffered) < self.buffer_groups else 0)

    def admit(self, board: Board) -> Admission:
        """The first groups that arrived, without those that are too old by now."""
        pulled: list[Group] = []
        stale: dict[int, str] = {}
        for group in _sound(board):
            if len(pulled) == self.prompts_per_step:
                break
            if board.steps_done - group.version > self.max_age:
                stale[group.ordinal] = STALE
            else:
                pulled.append(group)
        return _admission(board, pulled, self.prompts_per_step, stale)


@dataclass(frozen=True, slots=True)
class AggregateAdmission:
    """AReaL and SkyRL: what is admitted to generation is bounded in sum, as if every group took equally long; nothing
    is dropped and nothing waited for. So a long group can come back at any age, and is trained."""

    prompts_per_step: int
    max_age: int
    masks: ClassVar[bool] = False

    def room(self, board: Board) -> Room:
        budget = (self.max_age + board.live_version + 1) * self.prompts_per_step - board.frontier.counts().leased
        return Room(min(board.places - len(board.in_flight), budget))

    def admit(self, board: Board) -> Admission:
        return _admission(board, _sound(board), self.prompts_per_step)


@dataclass(frozen=True, slots=True)
class HardDrop:
    """prime-rl and open-instruct: a group that was dispatched too long ago is dropped wherever it is, in flight too.
    The bound holds, and long groups are the ones that are lost.
    Generation rests while a whole step's groups lie ready."""

    prompts_per_step: int
    max_age: int
    masks: ClassVar[bool] = False

    def room(self, board: Board) -> Room:
        return Room(board.places - len(board.in_flight) if len(board.buffered) < self.prompts_per_step else 0)

    def admit(self, board: Board) -> Admission:
        oldest = board.steps_done - self.max_age
        sound = _sound(board)
        stale = {group.ordinal: STALE for group in [*sound, *board.in_flight.values()] if group.version < oldest}
        return _admission(board, [group for group in sound if group.ordinal not in stale], self.prompts_per_step, stale)


@dataclass(frozen=True, slots=True)
class Wait:
    """verl's `wait`: before a step the trainer waits for every group that would be too old for the step after it. The
    bound holds, nothing is lost, and the trainer keeps the pace of the longest rollouts."""

    prompts_per_step: int
    max_age: int
    masks: ClassVar[bool] = False

    def room(self, board: Board) -> Room:
        budget = (board.live_version + self.max_age + 1 - board.steps_done) * self.prompts_per_step
        return Room(min(board.places - len(board.in_flight), budget - board.open_ordinals))

    def admit(self, board: Board) -> Admission:
        late = any(group.version <= board.steps_done - self.max_age for group in board.in_flight.values())
        oldest_first = sorted(_sound(board), key=lambda group: (group.version, group.ordinal))
        return _admission(board, [] if late else oldest_first, self.prompts_per_step)


def baselines(prompts_per_step: int, max_age: int) -> dict[str, Rule]:
    """Every rule by the name it has in tables. They keep no state, so one object serves any number of runs."""
    return {
        "exact target (NeMo RL)": ExactTarget(prompts_per_step, max_age),
        "drop at pull (TRL)": DropAtPull(prompts_per_step, max_age),
        "aggregate admission (AReaL, SkyRL)": AggregateAdmission(prompts_per_step, max_age),
        "hard drop (prime-rl)": HardDrop(prompts_per_step, max_age),
        "wait (verl)": Wait(prompts_per_step, max_age),
    }


def _sound(board: Board) -> list[Group]:
    """The buffered groups that did not fail, in the order in which they arrived."""
    return [group for group in board.buffered.values() if not group.fails]


def _admission(board: Board, chosen: Iterable[Group], wanted: int, stale: dict[int, str] | None = None) -> Admission:
    """Train the first `wanted` of `chosen`, if there are so many; drop what failed and what is stale."""
    ordinals = tuple(group.ordinal for group in chosen)
    failed = {group.ordinal: GENERATION_FAILED for group in board.buffered.values() if group.fails}
    trained = ordinals[:wanted] if len(ordinals) >= wanted else ()
    return Admission(trained, {}, {**failed, **(stale or {})}, len(ordinals))
