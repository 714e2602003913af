"""The evaluations of one attempt: the one under way, those that are due, and what is known of the others.

Contract: at most one evaluation is under way. The first and the last one have the engines to themselves; those between
go beside training. What is due is decided by `schedule.agenda` from what the store holds, so a restart neither repeats
nor forgets; a due version that passed before its turn is served by the version that is live then, whose evaluation is
recorded with both. An evaluation that reaches the run's goal is told to the trainer through the store; so is, at the
start of an attempt, one of the history it continues.
"""

from collections.abc import Callable, Sequence

from flows.control import Control, Dispatched
from flows.evaluate import EvaluationJob
from grpo_core.config import RunConfig
from grpo_core.evaluation import Evaluation, goal_of, goal_reached, living_evaluations
from grpo_core.prompts import Row
from grpo_core.rollout.group import Generator
from grpo_core.rollout.pool import NoEngine
from grpo_core.schedule.agenda import Agenda
from grpo_core.trajectory import Stamp
from storage import layout
from storage.attempts import Fence, living_chain
from storage.objects import ObjectStore
from storage.records import encode_record


class Evaluating:
    """`goal` is the evaluation with which the run has reached its goal, `newest` the newest of this attempt."""

    def __init__(
        self,
        config: RunConfig,
        store: ObjectStore,
        attempt: int,
        *,
        held_out: Sequence[Row],
        generator: Generator,
        control: Control,
        stopped: Callable[[], bool],
        publish: Callable[[Evaluation], None],
    ) -> None:
        self._config = config
        self._store = store
        self._attempt = attempt
        self._held_out = held_out
        self._generator = generator
        self._control = control
        self._stopped = stopped
        self._publish = publish
        self._agenda = Agenda.of(config.evaluation, config.refit)
        self._running: tuple[int, Dispatched[Evaluation]] | None = None
        chain, every = living_chain(store), config.refit.every_steps
        # Those under way are among them.
        self._evaluated = {name.version for name in living_evaluations(store, chain, every_steps=every)}
        self.newest: Evaluation | None = None
        self.goal: Evaluation | None = None
        self._heed_goal(goal_reached(store, config))

    def first(self, steps_done: int, *, leased: bool) -> bool:
        """Whether version 0 is being evaluated, which comes before the first lease so that nothing else changes."""
        self._take_in()
        if self._running is None and steps_done == 0 and not leased and self._config.evaluation.at_start:
            self._begin(0)
        return self._running is not None and self._running[0] == 0

    def beside_training(self, live: int) -> None:
        """Take in an evaluation that has ended, and begin one that is due while version `live` is."""
        self._take_in()
        if self._running is None and self.goal is None and self._agenda.due(live, self._evaluated):
            self._begin(live)

    def last(self, version: int) -> bool:
        """Whether an evaluation is still under way or begins now, after the trainer has ended with this version."""
        self._take_in()
        if self._running is None and self._agenda.owed_at_end(version, self._evaluated):
            self._begin(version)
        return self._running is not None

    def _begin(self, version: int) -> None:
        if version in self._evaluated or not self._held_out:
            return
        due = self._agenda.due(version, self._evaluated)
        stamp = Stamp(self._attempt, version)
        job = EvaluationJob(
            self._generator,
            self._held_out,
            self._store,
            stamp,
            self._stopped,
            self._control.warn,
            due=due[0] if due else None,
        )
        self._evaluated.add(version)
        self._running = (version, self._control.evaluate(job))

    def _take_in(self) -> None:
        """Raise what an evaluation failed with, unless there was no engine for it: then it is due as before."""
        if self._running is None or not self._running[1].done():
            return
        (version, finished), self._running = self._running, None
        try:
            self.newest = finished.result()
        except NoEngine as outage:
            self._evaluated.remove(version)
            self._control.warn(f"the evaluation of version {version} begins again: {outage}")
            return
        self._control.say(self.newest.line())
        self._publish(self.newest)
        self._heed_goal(goal_of([self.newest], self._config))

    def _heed_goal(self, reached: Evaluation | None) -> None:
        """Tell the trainer to end after its current step."""
        if reached is None or self.goal is not None:
            return
        self.goal, settings = reached, self._config.evaluation
        fields = {"version": reached.version, "metric": settings.stop_metric, "threshold": settings.stop_threshold}
        Fence(self._store, self._attempt).check()
        self._store.commit(layout.goal(self._attempt), encode_record(fields))
        self._control.say(
            f"version {reached.version} reached evaluation.stop_threshold={settings.stop_threshold:g} in "
            f"{settings.stop_metric}: the run ends after its current step"
        )
