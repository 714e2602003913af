"""What a scheduling rule sees and answers, and our own rule in that form.

A rule is asked two questions: how many groups may be leased now, and what happens to the groups at hand: which of them
the next step trains, which go back to be generated again, which end here. What other systems answer is in
`grpo_core.schedule.baselines`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from grpo_core.schedule.admission import GENERATION_FAILED, Admission, Admissions, Candidate
from grpo_core.schedule.frontier import Frontier
from grpo_core.schedule.pool_model import Group
from grpo_core.schedule.supply import Supply
from grpo_core.schedule.window import Room, Window

# In a simulation nothing is learnt from giving up early.
HOPELESS_STEPS = 100


@dataclass(slots=True)
class Board:
    """What flow and trainer know. `places`: groups that the pool decodes at once; `in_flight`: ordinal → a group that
    is leased and not durable; `buffered`: ordinal → a group that waits for its step."""

    places: int
    frontier: Frontier = field(default_factory=Frontier)
    live_version: int = 0
    steps_done: int = 0
    in_flight: dict[int, Group] = field(default_factory=dict)
    buffered: dict[int, Group] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The step that is next."""
        return self.steps_done + 1

    @property
    def open_ordinals(self) -> int:
        """Ordinals that are leased and neither trained nor dropped, those of the step under way among them."""
        return self.frontier.counts().open


class Rule(Protocol):
    """One way to schedule."""

    @property
    def masks(self) -> bool:
        """Whether tokens older than the window get no gradient; otherwise whatever is admitted is trained."""

    def room(self, board: Board) -> Room:
        """What may be leased now."""

    def admit(self, board: Board) -> Admission:
        """Decide, for `board.step`, about the groups buffered and about those in flight that are to be given up."""


@dataclass(slots=True)
class Windowed:
    """Our rule: `Window`, `Admissions` and `Supply`, as flow and trainer use them.
    `follow_supply` False fills the whole window instead."""

    window: Window
    follow_supply: bool = True
    masks: ClassVar[bool] = True
    _admissions: Admissions = field(init=False)
    _supply: Supply = field(init=False)
    _asked: int = 0
    _ready: int = 0
    _ledgered: int = 0

    def __post_init__(self) -> None:
        window = self.window
        self._admissions = Admissions(window, hopeless_groups=HOPELESS_STEPS * window.prompts_per_step)
        self._supply = Supply.of(prompts_per_step=window.prompts_per_step, ceiling=window.most_open)

    def room(self, board: Board) -> Room:
        """As the flow is allowed it."""
        window, done = self.window, board.steps_done
        if done > self._ledgered:
            self._supply = self._supply.after_step(ready=self._ready, wanted=window.prompts_per_step)
            self._ledgered = done
        limit = self._supply.limit if self.follow_supply else window.most_open
        return window.room(board.frontier, live_version=board.live_version, done=done, limit=limit)

    def admit(self, board: Board) -> Admission:
        """As the trainer decides it."""
        window, targets = self.window, board.frontier.target_steps
        # Counted only for the policy that asks: this is called for every group that arrives.
        waits, bound = window.stale_policy == "wait", window.sampler == "in_order"
        admission = self._admissions.decide(
            [candidate(group, targets.get(ordinal)) for ordinal, group in board.buffered.items()],
            step=board.step,
            last_step=window.last_step(done=board.steps_done, settled=board.frontier.counts().settled),
            in_flight=Counter(group.version for group in board.in_flight.values()) if waits else None,
            bound=board.frontier.open_by_target() if bound else None,
        )
        if board.step != self._asked:
            self._asked, self._ready = board.step, admission.admissible
        return admission


def candidate(group: Group, target_step: int | None = None) -> Candidate:
    """A group as admission sees it."""
    return Candidate(
        group.ordinal,
        group.oldest_version,
        group.newest_version,
        failure=GENERATION_FAILED if group.fails else None,
        target_step=target_step,
        zero_variance=group.zero_variance,
    )
