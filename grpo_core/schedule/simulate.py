"""A run on a virtual clock: the product's own schedule against a model of the pool and of the trainer.

Test bench, benchmark and capacity planner in one. Leases, admission and the account of every ordinal are made by the
objects that flow and trainer use: `Frontier` and a rule, ours being `Window` with what belongs to it. Modelled are only
the things that take time: decoding (`pool_model`), scoring, the flush of parts, the step, the refit.

The flow leases whatever the rule allows, in leases of `lease_prompts`; each group goes to the engine with the least to
do. A finished group is scored, then committed with the next part of its lease, and is known to flow and trainer at
once. The trainer, when it is free, asks the rule; a step is ledgered at its end, and the refit due after it pauses all
engines. Running sequences go on under the new weights, unless the refit waits for them.

Faults: a dead engine loses its sequences, and their groups start anew elsewhere; a crashed trainer resumes from its
last checkpoint with the groups that were buffered there, and all else that was open is generated again.

Limits: polls, store requests and checkpoints take no time; scoring takes the same time for every group; steps differ by
their tokens only. A run is observed for a number of steps and need not end with them: sequences longer than the
observation are not seen to finish, and the tail of a run's very last steps does not weigh on the figures.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from grpo_core.schedule.admission import Admission
from grpo_core.schedule.frontier import Frontier
from grpo_core.schedule.outcome import Outcome, StepRecord, measure
from grpo_core.schedule.pool_model import Engine, Group, Pool
from grpo_core.schedule.rules import Board, Rule
from grpo_core.schedule.scenario import EngineDeath, Scenario, TrainerCrash
from grpo_core.schedule.workload import Draws

EVERY_LIFE = -1


class Stalled(RuntimeError):
    """Nothing more can happen before the last step; the message says where everything is."""


@dataclass(slots=True)
class Lease:
    """A lease in the simulation. `open`: ordinals that are not durable; `rows`: groups that wait for the next part."""

    open: set[int]
    flushed_at: float
    rows: list[Group] = field(default_factory=list)


def simulate(scenario: Scenario, rule: Callable[[], Rule]) -> Outcome:
    """Simulate a run; `rule` makes a fresh rule for each life of the trainer.
    Raise Stalled, and whatever a rule raises."""
    return Simulation(scenario, rule).run()


class Simulation:
    """One run. When it is over, `frontier` and `records` (the living steps) tell what became of every ordinal."""

    def __init__(self, scenario: Scenario, rule: Callable[[], Rule]) -> None:
        self._scenario = scenario
        self._make_rule = rule
        self._rule = rule()
        self._draws = Draws(scenario.workload)
        self._pool = Pool(scenario.pool)
        self._board = Board(places=scenario.places)
        self._events: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0
        self._now = 0.0
        self._life = 0
        self._leases: dict[int, Lease] = {}
        self._next_lease = 0
        self._starts: Counter[int] = Counter()
        self._free = True
        self._training: tuple[Group, ...] = ()
        self._saved = (self.frontier.checkpoint(), dict(self._board.buffered))
        self.records: list[StepRecord] = []
        self.wasted_tokens = 0.0
        self.wasted_groups = 0

    @property
    def frontier(self) -> Frontier:
        return self._board.frontier

    @property
    def generated(self) -> float:
        """Tokens decoded so far."""
        return self._pool.generated

    def open_tokens(self) -> float:
        """Tokens of the groups in flight, buffered, or in the step under way."""
        groups = [*self._board.in_flight.values(), *self._board.buffered.values(), *self._training]
        return math.fsum(group.generated for group in groups) + self._pool.unfinished_tokens

    def run(self) -> Outcome:
        """Simulate until the last step is ledgered. Raise Stalled."""
        for fault in self._scenario.faults:
            strike = self._kill_engine if isinstance(fault, EngineDeath) else self._crash
            self._schedule(fault.at, EVERY_LIFE, strike, fault)
        self._lease()
        while self._board.steps_done < self._scenario.steps:
            if not self._events:
                raise Stalled(
                    f"the simulation stands still at {self._now:g} s before step {self._board.step} of "
                    f"{self._scenario.steps}, with {self.frontier.counts()}: the rule leases nothing and trains nothing"
                )
            self._now, _, life, happen, arguments = heapq.heappop(self._events)
            if life in (self._life, EVERY_LIFE):
                happen(*arguments)
        for engine in self._pool.engines:
            engine.advance(self._now)
        return measure(
            self._scenario,
            self.records,
            masks=self._rule.masks,
            wall=self._now,
            generated=self.generated,
            wasted_tokens=self.wasted_tokens,
            wasted_groups=self.wasted_groups,
            counts=self.frontier.counts(),
        )

    def _schedule(self, when: float, life: int, happen: Callable[..., None], *arguments: Any) -> None:
        self._scheduled += 1
        heapq.heappush(self._events, (when, self._scheduled, life, happen, arguments))

    def _after(self, seconds: float, happen: Callable[..., None], *arguments: Any) -> None:
        """Let something happen in a while, unless the trainer crashes before."""
        self._schedule(self._now + seconds, self._life, happen, *arguments)

    # The flow: leases, generation, parts.

    def _lease(self) -> None:
        """Lease all that the rule allows."""
        while (room := self._rule.room(self._board)).groups > 0:
            ordinals = self.frontier.lease(min(room.groups, self._scenario.flow.lease_prompts))
            self._leases[self._next_lease] = Lease(set(ordinals), self._now)
            for ordinal in ordinals:
                if room.target_step is not None:
                    self.frontier.set_target_step(ordinal, room.target_step)
                self._start(ordinal, self._next_lease, self._board.live_version, tried=1)
            self._next_lease += 1

    def _start(self, ordinal: int, lease: int, version: int, *, tried: int) -> None:
        """Send one attempt at a group to the pool."""
        drawn = self._draws.draw(ordinal, self._starts[ordinal])
        self._starts[ordinal] += 1
        group = Group(ordinal, lease, version, tried, drawn.tokens, drawn.fails, drawn.zero_variance)
        self._board.in_flight[ordinal] = group
        self._send([group])

    def _send(self, groups: Iterable[Group]) -> None:
        for group in groups:
            engine = self._pool.submit(group, self._now)
            if engine is not None:
                self._arm(engine)

    def _arm(self, engine: Engine) -> None:
        """Wake up when the next sequence of an engine ends; whatever was armed before no longer holds."""
        engine.epoch += 1
        due = engine.due()
        if due is not None:
            self._schedule(due, self._life, self._sequence_ended, engine, engine.epoch)

    def _sequence_ended(self, engine: Engine, epoch: int) -> None:
        if epoch != engine.epoch:
            return
        engine.advance(self._now)
        for group in engine.finish():
            self._pool.forget(group)
            if group.fails and group.tried < self._scenario.flow.max_attempts:
                self._retry(group)
            else:
                self._after(self._scenario.flow.reward_seconds, self._scored, group)
        self._arm(engine)
        self._refit_if_drained()

    def _retry(self, group: Group) -> None:
        """Generate a group again under the same lease."""
        self._waste([group])
        self._start(group.ordinal, group.lease, group.version, tried=group.tried + 1)

    def _scored(self, group: Group) -> None:
        """A part is written with the last group of a lease, and otherwise every `flush_seconds`."""
        if self._board.in_flight.get(group.ordinal) is not group:
            return
        lease = self._leases[group.lease]
        lease.rows.append(group)
        wait = lease.flushed_at + self._scenario.flow.flush_seconds - self._now
        if len(lease.rows) == len(lease.open) or wait <= 0:
            self._flush(group.lease)
        elif len(lease.rows) == 1:
            self._after(wait, self._flush, group.lease)

    def _flush(self, number: int) -> None:
        lease = self._leases.get(number)
        if lease is None or not lease.rows:
            return
        for group in lease.rows:
            self._board.buffered[group.ordinal] = self._board.in_flight.pop(group.ordinal)
        self.frontier.buffered(group.ordinal for group in lease.rows)
        lease.open.difference_update(group.ordinal for group in lease.rows)
        lease.rows, lease.flushed_at = [], self._now
        if not lease.open:
            del self._leases[number]
        self._lease()
        self._consider()

    # The trainer: admission, step, refit.

    def _consider(self) -> None:
        """If the trainer is free, let the rule decide."""
        if not self._free:
            return
        admission = self._rule.admit(self._board)
        self._settle(admission)
        if admission.trained:
            self._free = False
            self._training = tuple(self._board.buffered.pop(ordinal) for ordinal in admission.trained)
            tokens = math.fsum(group.generated for group in self._training)
            trainer = self._scenario.trainer
            seconds = trainer.step_seconds + trainer.seconds_per_token * tokens
            self._after(seconds, self._step_ended, seconds)
        if admission.returned or admission.dropped:
            self._lease()

    def _settle(self, admission: Admission) -> None:
        """Take out what is returned and dropped; the frontier follows."""
        gone = [*admission.returned, *admission.dropped]
        flying = [self._board.in_flight.pop(ordinal) for ordinal in gone if ordinal in self._board.in_flight]
        self._waste(self._board.buffered.pop(ordinal) for ordinal in gone if ordinal in self._board.buffered)
        self._withdraw(flying)
        for group in flying:
            lease = self._leases[group.lease]
            lease.open.discard(group.ordinal)
            lease.rows = [row for row in lease.rows if row is not group]
            if not lease.open:
                del self._leases[group.lease]
        self.frontier.returned(admission.returned)
        for ordinal, reason in admission.dropped.items():
            self.frontier.dropped([ordinal], reason)

    def _step_ended(self, seconds: float) -> None:
        board, trainer = self._board, self._scenario.trainer
        version = (board.step - 1) // trainer.every_steps
        self.records.append(StepRecord(board.step, version, seconds, self._training))
        self.frontier.trained((group.ordinal for group in self._training), board.step)
        self._training = ()
        board.steps_done += 1
        if board.steps_done % trainer.save_period == 0:
            self._saved = (self.frontier.checkpoint(), dict(board.buffered))
        if board.steps_done % trainer.every_steps:
            self._resume()
        elif trainer.drain:
            self._pool.draining = True
            self._refit_if_drained()
        else:
            self._begin_refit()

    def _refit_if_drained(self) -> None:
        if self._pool.draining and self._pool.idle:
            self._begin_refit()

    def _begin_refit(self) -> None:
        self._pool.draining = False
        self._pause(True)
        self._after(self._scenario.trainer.refit_seconds, self._refit_ended)

    def _refit_ended(self) -> None:
        self._board.live_version = self._board.steps_done // self._scenario.trainer.every_steps
        for engine in self._pool.engines:
            engine.advance(self._now)
            engine.refit(self._board.live_version)
        self._pause(False)
        self._resume()

    def _resume(self) -> None:
        """The trainer is free, and the window has moved."""
        self._free = True
        self._send(self._pool.release())
        self._lease()
        self._consider()

    def _pause(self, paused: bool) -> None:
        for engine in self._pool.engines:
            engine.advance(self._now)
            engine.paused = paused
            self._arm(engine)

    # What goes wrong.

    def _waste(self, groups: Iterable[Group], *, unfinished: float = 0.0) -> None:
        """Throw these groups away, with the tokens of the members that had not finished."""
        self.wasted_tokens += unfinished
        for group in groups:
            self.wasted_tokens += group.generated
            self.wasted_groups += 1

    def _withdraw(self, groups: list[Group]) -> None:
        """Throw away groups in flight, wherever they are."""
        lost, touched = self._pool.withdraw(groups, self._now)
        self._waste(groups, unfinished=lost)
        for engine in touched:
            self._arm(engine)

    def _kill_engine(self, death: EngineDeath) -> None:
        engine = self._pool.engines[death.engine]
        engine.advance(self._now)
        engine.alive = False
        lost = self._pool.on(engine)
        self._withdraw(lost)
        for group in lost:
            tried = min(group.tried + 1, self._scenario.flow.max_attempts)
            self._start(group.ordinal, group.lease, group.version, tried=tried)
        self._schedule(self._now + death.seconds, EVERY_LIFE, self._revive, engine)
        self._refit_if_drained()

    def _revive(self, engine: Engine) -> None:
        engine.advance(self._now)
        engine.alive = True
        self._send(self._pool.release())

    def _crash(self, crash: TrainerCrash) -> None:
        """Go back to the last checkpoint; every engine gets the weights of its version."""
        board = self._board
        state, buffered = self._saved
        dead = [record for record in self.records if record.step > state.step]
        closed = [*board.buffered.values(), *self._training, *(group for record in dead for group in record.groups)]
        self._life += 1
        kept = set(buffered.values())
        self._waste(group for group in closed if group not in kept)
        # What was thrown away since the checkpoint is there again.
        self.wasted_tokens -= math.fsum(group.generated for group in kept.difference(closed))
        self._pool.draining = False
        self._withdraw(list(board.in_flight.values()))
        self.records = self.records[: state.step]
        self._board = Board(
            board.places,
            Frontier.resume(state),
            state.step // self._scenario.trainer.every_steps,
            state.step,
            {},
            dict(buffered),
        )
        self._leases, self._training, self._free = {}, (), False
        self._rule = self._make_rule()
        self._pause(True)
        self._after(crash.seconds, self._refit_ended)
