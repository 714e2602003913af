"""What the trainer does next: rank 0's side of the training loop, as a generator of commands.

    refit (cold) → for each step: admit → step → ledger → refit → checkpoint

Rank 0 yields a command, every rank of the group carries it out, and the result comes back from the yield. So the
whole algorithm reads top to bottom here, while the other ranks only follow.

Invariants: the ledger of a step is durable before its weights leave for the engines, and both before the manifest;
the fence is checked before each of them; drops and returns are written within `flush_seconds` of being decided, so
useless groups free their capacity before the step can happen. A checkpoint of step s is the state right after s,
whenever it is written: what was decided while waiting for s + 1 is ledgered under s + 1, so it is not of the history
that a resume from s continues, and the resumed attempt decides it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

from grpo_core.config import RunConfig, StreamData
from grpo_core.metrics import finite, reported
from grpo_core.schedule.admission import Admission, Admissions
from grpo_core.schedule.window import Window
from grpo_core.training.accounts import Decisions, step_rows, unfinished_rows
from grpo_core.training.commands import IDLE_SECONDS, Command, Commands, Idle, Save, Step, TrainerStuck
from grpo_core.training.feed import BufferedGroup, Feed
from grpo_core.training.flops import Machine
from grpo_core.training.measures import Clock, Measures, arithmetic_measures, clock_measures, refit_measures
from grpo_core.training.optimizer import learning_rate
from grpo_core.training.planning import TrainedGroup, plan_step, step_credit
from grpo_core.training.refitting import Refitting
from grpo_core.training.step import StepPlan, StepResult
from grpo_core.trajectory import Stamp
from storage import layout
from storage.ledger import LedgerWriter, Totals, ledger_rows
from storage.objects import ObjectStore

END_OF_DATA = "end_of_data"


class Conductor:
    """Rank 0's knowledge of the run and its decisions. `stopping` says whether we were asked to end early, `prompts`
    how many one epoch has, once that is known."""

    def __init__(
        self,
        *,
        config: RunConfig,
        store: ObjectStore,
        attempt: int,
        window: Window,
        done: int,
        feed: Feed,
        ledger: LedgerWriter,
        totals: Totals,
        fence: Callable[[], None],
        stopping: Callable[[], bool],
        report: Callable[[dict[str, Any]], None],
        prompts: Callable[[], int | None],
        ranks: int,
        machine: Machine | None = None,
    ) -> None:
        self._config = config
        self._store = store
        self._attempt = attempt
        self._window = window
        hopeless = config.grpo.async_grpo.max_batches_without_group * window.prompts_per_step
        self._admissions = Admissions(window, hopeless)
        self._done = done
        self._feed = feed
        self._refitting = Refitting(
            config=config, store=store, attempt=attempt, fence=fence, stopping=stopping, report=report
        )
        self._ledger = ledger
        self._totals = totals
        self._fence = fence
        self._stopping = stopping
        self._report = report
        self._prompts = prompts
        self._ranks = ranks
        self._machine = machine
        self._measures: Measures = {}
        self._metrics: dict[str, float] = {}
        self._given_up = Decisions()
        self._clock = Clock(0.0, 0.0, 0.0, None)
        self._taken_at = 0.0  # when the step took its groups, in Unix seconds
        self._ended: float | None = None  # the step before, on the monotonic clock
        self._unsaved: Save | None = None
        self._save_metrics: dict[str, float] = {}

    def commands(self) -> Commands:
        """The run, from the checkpoint it resumed from to its last step."""
        yield from self._refit(self._done)
        self._learn_size()
        while self._done < self._last_step() and not self._ending():
            step = self._done + 1
            groups = yield from self._admit(step)
            if not groups:
                break
            plan = self._plan(step, groups)
            result: StepResult = yield Step(plan)
            self._record(plan, groups, result)
            if self._window.refit_due(step):
                yield from self._refit(step)
            if step % self._config.checkpointing.save_period == 0 or step == self._last_step():
                yield from self._save()
        if self._last_step() <= self._done < self._window.steps:
            self._end_of_data()
        yield from self._save()

    def _ending(self) -> bool:
        """Whether there is to be no further step: we were asked to end early,
        or an evaluation reached the run's goal."""
        return self._stopping() or self._store.exists(layout.goal(self._attempt))

    def _last_step(self) -> int:
        """The last step that the run and its data allow, as far as we know."""
        return self._window.last_step(done=self._done, settled=self._feed.frontier.counts().settled)

    def _learn_size(self) -> None:
        """How many prompts a stream has is known once it has been read to its end."""
        if self._window.prompts is None and self._window.epochs is not None:
            self._window = replace(self._window, prompts=self._prompts())

    def _admit(self, step: int) -> Generator[Command, Any, list[BufferedGroup]]:
        """Wait until step `step` has enough admissible groups;
        meanwhile decide about the others and serve late engines.

        Empty when there is to be no further step, or when what is left of the data does not fill it.
        """
        feed, began, progress, idle = self._feed, time.monotonic(), time.monotonic(), time.monotonic()
        pending, ready = Decisions(), -1
        while not self._ending():
            self._learn_size()
            # Before the first lease nothing can arrive: version 0 may be under evaluation.
            if feed.poll() or feed.last_lease < 0:
                progress = time.monotonic()
                for group in feed.groups.values():
                    self._refitting.doubt(group)
            admission = self._decide(step)
            ready = admission.admissible if ready < 0 else ready
            pending = pending.with_admission(admission, feed.groups, at=time.monotonic())
            self._given_up = self._given_up.with_admission(admission, feed.groups, at=time.monotonic())
            for ordinal in [*admission.returned, *admission.dropped]:
                feed.groups.pop(ordinal)
            if pending.due(time.monotonic(), self._config.generation.flush_seconds) or (pending and admission.trained):
                self._flush(step, pending)
                pending = Decisions()
            if admission.trained:
                self._clock = replace(self._clock, wait=time.monotonic() - began)
                self._taken_at = time.time()
                taken = [feed.groups.pop(ordinal) for ordinal in admission.trained]
                self._measures = {
                    "ready_groups": float(ready),
                    "buffered_groups": float(len(feed.groups)),
                    "in_flight_groups": float(feed.frontier.counts().in_flight),
                }
                return taken
            if step > self._last_step():
                if pending:
                    self._flush(step, pending)
                return []
            if self._refitting.lacking(self._done):
                yield from self._refit(self._done)
            self._check_progress(step, progress)
            if time.monotonic() - idle > IDLE_SECONDS:
                self._fence()
                yield Idle()
                idle = time.monotonic()
            time.sleep(self._store.poll_seconds)
        return []

    def _decide(self, step: int) -> Admission:
        feed = self._feed
        return self._admissions.decide(
            feed.candidates(self._refitting.distrusted),
            step=step,
            in_flight=feed.in_flight,
            bound=feed.frontier.open_by_target(),
            last_step=self._last_step(),
        )

    def _end_of_data(self) -> None:
        """What is left open does not fill another step: it ends here, in the ledger like everything else."""
        frontier = self._feed.frontier
        left = frontier.unfinished()
        if not left:
            return
        rows = ledger_rows(unfinished_rows(left, self._feed.groups, END_OF_DATA))
        self._totals = self._totals.add(rows)
        self._ledger.write_drops(self._done + 1, rows, self._totals)
        frontier.dropped(left, END_OF_DATA)
        self._feed.groups.clear()

    def _check_progress(self, step: int, since: float) -> None:
        limit = self._config.training.step_timeout_seconds
        if time.monotonic() - since > limit:
            counts = self._feed.frontier.counts()
            raise TrainerStuck(
                f"step {step} waited {limit:g} s without a new group: {len(self._feed.groups)} of {self._window.prompts_per_step} are buffered, "
                f"{counts.in_flight} in flight; look at the generation tasks and engines, or raise training.step_timeout_seconds"
            )

    def _flush(self, step: int, pending: Decisions) -> None:
        """Ledger what was dropped and returned, then let the frontier follow."""
        rows = ledger_rows(pending.rows())
        self._totals = self._totals.add(rows)
        self._ledger.write_drops(step, rows, self._totals)
        for reason, ordinals in pending.dropped_by_reason().items():
            self._feed.frontier.dropped(ordinals, reason)
        self._feed.frontier.returned(pending.returned_ordinals())

    def _plan(self, step: int, groups: Sequence[BufferedGroup]) -> StepPlan:
        """Advantages, and what follows from them for the step."""
        config, window, began = self._config, self._window, time.monotonic()
        rows = [self._feed.cache.rows(group.places()) for group in groups]
        credit = step_credit(groups, rows, config, oldest_version=window.oldest_version(step))
        self._measures |= credit.metrics
        trained = []
        for number, group in enumerate(groups):
            rollouts = list(group.rollouts)
            trained.append(
                TrainedGroup(
                    group.ordinal,
                    group.places(),
                    rows[number],
                    credit.advantages[number, rollouts].tolist(),
                    credit.trained[number, rollouts].tolist(),
                    credit.rewarded[number, rollouts].tolist(),
                )
            )
        plan = plan_step(
            step,
            trained,
            ranks=self._ranks,
            token_budget=config.packing.token_budget,
            share_prefixes=config.packing.share_prefixes,
            minibatches=config.grpo.minibatches,
            version=window.training_version(step),
            oldest_version=window.oldest_version(step),
            max_completion_length=config.most_generated,
            learning_rate=learning_rate(step - 1, self._scheduled_steps(), config.optimizer),
        )
        self._clock = replace(self._clock, plan=time.monotonic() - began)
        return plan

    def _scheduled_steps(self) -> int:
        """The length of the learning rate's schedule. A stream's end may become known at any moment,
        and must not bend it."""
        if isinstance(self._config.data.source, StreamData):
            return self._window.steps
        return self._window.last_step()

    def _record(self, plan: StepPlan, groups: Sequence[BufferedGroup], result: StepResult) -> None:
        """Ledger the step, durable before anything else happens because of it."""
        config, places = self._config, self._feed.cache.rows(plan.places)
        account = step_rows(
            plan,
            groups,
            places,
            result,
            version=self._window.training_version(plan.step),
            logprobs=config.logging.trainer_logprobs,
            given_up=self._given_up,
            token_budget=config.packing.token_budget,
            taken_at=self._taken_at,
        )
        rows = ledger_rows(account.rows)
        self._totals = self._totals.add(rows, account.lag_tokens)
        now, before = time.monotonic(), self._ended
        clock = replace(self._clock, step=result.seconds, iteration=None if before is None else now - before)
        measures = (
            self._measures | account.measures | refit_measures(self._refitting.take_results()) | self._save_metrics
        )
        measures |= clock_measures(clock, result, account.measures)
        if self._machine is not None:
            measures |= arithmetic_measures(self._machine, plan, places, config.objective, clock)
        self._metrics = reported(measures)
        self._save_metrics, self._given_up, self._ended = {}, Decisions(), now
        self._ledger.write_step(plan.step, rows, self._totals, self._metrics)
        self._feed.frontier.trained([group.ordinal for group in groups], plan.step)
        self._done = plan.step
        self._feed.cache.keep(
            layout.part(p.attempt, p.lease, p.part) for p in {group.part for group in self._feed.groups.values()}
        )
        self._unsaved = Save(plan.step, self._facts())
        self._report({"step": plan.step, "metrics": self._metrics})

    def _refit(self, step: int) -> Generator[Command, Any, None]:
        stamp = Stamp(self._attempt, step // self._window.every_steps)
        yield from self._refitting.refit(stamp, step, self._feed.last_lease)

    def _facts(self) -> dict[str, Any]:
        """What a checkpoint keeps of this moment. No decision may be pending: the groups are those buffered."""
        pinned = {group.part for group in self._feed.groups.values()}
        return {
            "version": self._done // self._window.every_steps,
            "frontier": self._feed.frontier.checkpoint().to_json(),
            "pinned": [[part.attempt, part.lease, part.part] for part in sorted(pinned)],
            "metrics": finite(self._metrics),
        }

    def _save(self) -> Generator[Command, Any, None]:
        """Save the latest step, if it is not saved yet."""
        if self._unsaved is not None:
            self._fence()
            self._save_metrics = yield self._unsaved
            self._unsaved = None
