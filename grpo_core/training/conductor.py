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

import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

from grpo_core.config import RunConfig, StreamData
from grpo_core.metrics import finite, reported
from grpo_core.objective.credit import Credit, step_advantages
from grpo_core.refit.control import EngineAddress
from grpo_core.refit.coordinator import RefitFailed, RefitResult
from grpo_core.schedule.admission import Admission, Admissions
from grpo_core.schedule.window import Window
from grpo_core.training.accounts import Decisions, step_rows, unfinished_rows
from grpo_core.training.commands import Command, Commands, Idle, Refit, Save, Step
from grpo_core.training.feed import BufferedGroup, Feed
from grpo_core.training.flops import Machine
from grpo_core.training.measures import Clock, Measures, arithmetic_measures, clock_measures, refit_measures
from grpo_core.training.optimizer import learning_rate
from grpo_core.training.planning import TrainedGroup, plan_step
from grpo_core.training.step import StepPlan, StepResult
from grpo_core.trajectory import Stamp
from storage import layout
from storage.ledger import LedgerWriter, Totals, ledger_rows
from storage.objects import ObjectStore
from storage.pool import RefitRecord, read_pool_changes, write_refit

END_OF_DATA = "end_of_data"
# The other ranks wait in a collective; a command at least this often tells them that rank 0 is alive.
IDLE_SECONDS = 20.0


class TrainerStuck(RuntimeError):
    """Nothing arrived to train on within the deadline; the message names what was waited for."""


class Conductor:
    """Rank 0's knowledge of the run and its decisions. `stopping` says whether we were asked to end early, `prompts` how
    many one epoch has, once that is known."""

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
        self._ledger = ledger
        self._totals = totals
        self._fence = fence
        self._stopping = stopping
        self._report = report
        self._prompts = prompts
        self._ranks = ranks
        self._machine = machine
        self._engines: dict[str, EngineAddress] = {}
        self._carrying: set[str] = set()
        self._leases_before: dict[str, int] = {}  # engine → the newest lease at its last refit
        self._refitted = -1  # the step whose weights they carry
        self._broken: dict[str, str] = {}
        self._distrusted: dict[str, int] = {}
        self._changes = -1
        self._measures: Measures = {}
        self._metrics: dict[str, float] = {}
        self._given_up = Decisions()
        self._refits: list[tuple[RefitResult, float]] = []
        self._clock = Clock(0.0, 0.0, 0.0, None)
        self._ended: float | None = None  # the step before, on the monotonic clock
        self._unsaved: Save | None = None
        self._save_metrics: dict[str, float] = {}

    def commands(self) -> Commands:
        """The run, from the checkpoint it resumed from to its last step."""
        yield from self._refit(self._done)
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
        """Whether there is to be no further step: we were asked to end early, or an evaluation reached the run's goal."""
        return self._stopping() or self._store.exists(layout.goal(self._attempt))

    def _last_step(self) -> int:
        """The last step that the run and its data allow, as things stand."""
        if self._window.prompts is None and self._window.epochs is not None:
            self._window = replace(self._window, prompts=self._prompts())
        return self._window.last_step(done=self._done, settled=self._feed.frontier.counts().settled)

    def _admit(self, step: int) -> Generator[Command, Any, list[BufferedGroup]]:
        """Wait until step `step` has enough admissible groups; meanwhile decide about the others and serve late engines.

        Empty when there is to be no further step, or when what is left of the data does not fill it.
        """
        feed, began, progress, idle = self._feed, time.monotonic(), time.monotonic(), time.monotonic()
        pending, ready = Decisions(), -1
        while not self._ending():
            # Before the first lease nothing can arrive: version 0 may be under evaluation.
            if feed.poll() or feed.last_lease < 0:
                progress = time.monotonic()
                self._doubt_engines()
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
            if self._joined() and self._may_join():
                yield from self._refit(self._done)
            self._check_progress(step, progress)
            if time.monotonic() - idle > IDLE_SECONDS:
                self._fence()
                yield Idle()
                idle = time.monotonic()
            time.sleep(self._store.poll_seconds)
        return []

    def _doubt_engines(self) -> None:
        """An engine whose groups come back from weights outside the living history has not kept ours, whatever we believe:
        the next refit includes it. What was leased before its last refit says nothing about it."""
        for group in self._feed.groups.values():
            if group.foreign and group.part.attempt == self._attempt:
                self._carrying -= {
                    name for name in group.engines if group.part.lease > self._leases_before.get(name, -1)
                }

    def _decide(self, step: int) -> Admission:
        feed = self._feed
        return self._admissions.decide(
            feed.candidates(self._distrusted),
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
        credit = step_credit(groups, config)
        self._measures |= credit.metrics
        trained = []
        for number, group in enumerate(groups):
            places, rollouts = group.places(), list(group.rollouts)
            trained.append(
                TrainedGroup(
                    group.ordinal,
                    places,
                    self._feed.cache.rows(places),
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
            max_completion_length=config.generation.max_rollout_length or config.generation.max_completion_length,
            learning_rate=learning_rate(step - 1, self._scheduled_steps(), config.optimizer),
        )
        self._clock = replace(self._clock, plan=time.monotonic() - began)
        return plan

    def _scheduled_steps(self) -> int:
        """The length of the learning rate's schedule. A stream's end may become known at any moment, and must not bend it."""
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
        )
        rows = ledger_rows(account.rows)
        self._totals = self._totals.add(rows, account.lag_tokens)
        now, before = time.monotonic(), self._ended
        clock = replace(self._clock, step=result.seconds, iteration=None if before is None else now - before)
        measures = self._measures | account.measures | refit_measures(self._refits) | self._save_metrics
        measures |= clock_measures(clock, result, account.measures)
        if self._machine is not None:
            measures |= arithmetic_measures(self._machine, plan, places, config.objective, clock)
        self._metrics = reported(measures)
        self._save_metrics, self._given_up, self._refits, self._ended = {}, Decisions(), [], now
        self._ledger.write_step(plan.step, rows, self._totals, self._metrics)
        self._feed.frontier.trained([group.ordinal for group in groups], plan.step)
        self._done = plan.step
        self._feed.cache.keep(
            layout.part(p.attempt, p.lease, p.part) for p in {group.part for group in self._feed.groups.values()}
        )
        self._unsaved = Save(plan.step, self._facts())
        self._report({"step": plan.step, "metrics": self._metrics})

    def _joined(self) -> bool:
        """Read the pool's membership; whether an engine is there that does not carry our weights."""
        for change in read_pool_changes(self._store, self._attempt, after=self._changes):
            self._changes += 1
            for name in change.left:
                self._engines.pop(name, None)
                self._carrying.discard(name)
            self._engines |= {name: EngineAddress(name, url) for name, url in change.joined.items()}
        return bool(self._engines.keys() - self._carrying)

    def _may_join(self) -> bool:
        """Whether an engine may be given our weights now. Between refits they can be newer than the version that the
        others carry, and one version must be one set of weights; then it waits for the next refit."""
        return self._done == self._refitted or not self._carrying

    def _refit(self, step: int) -> Generator[Command, Any, None]:
        """Bring every engine of the pool that lacks them to the weights after `step`; wait for an engine while none has
        them."""
        stamp = Stamp(self._attempt, step // self._window.every_steps)
        began = progress = time.monotonic()
        if step != self._refitted:
            self._carrying.clear()
            self._refitted = step
        while not self._stopping():
            if self._joined():
                self._fence()
                engines = tuple(engine for name, engine in self._engines.items() if name not in self._carrying)
                result: RefitResult | RefitFailed = yield Refit(stamp, engines)
                for broken in result.broken:
                    self._engines.pop(broken.name)
                    self._broken[broken.name] = f"{broken.phase}: {broken.cause}"
                    self._distrusted[broken.name] = stamp.version
                # All of them, ever: the report is overwritten, and a name is never used for two engines.
                self._report({"broken_engines": dict(self._broken)})
                if isinstance(result, RefitResult):
                    self._note_refit(result, step, time.monotonic() - began)
                if self._carrying:
                    return
            if time.monotonic() - progress > IDLE_SECONDS:
                self._fence()
                yield Idle()
                progress = time.monotonic()
            limit = self._config.pool.start_timeout_seconds + self._config.refit.transfer_timeout_seconds
            if time.monotonic() - began > limit:
                causes = "; ".join(f"{name}: {cause}" for name, cause in list(self._broken.items())[-1:])
                raise TrainerStuck(
                    f"no engine took the weights {stamp} within {limit:g} s; look at the engines' logs{causes and f', the last broke in {causes}'}"
                )
            time.sleep(self._store.poll_seconds)

    def _note_refit(self, result: RefitResult, step: int, seconds: float) -> None:
        """Say in the store, and then to whoever watches, which engines carry the weights after `step`."""
        self._refits.append((result, seconds))
        self._carrying |= set(result.refitted)
        self._leases_before |= dict.fromkeys(result.refitted, self._feed.last_lease)
        version = result.stamp.version
        write_refit(
            self._store,
            RefitRecord(self._attempt, version, step, result.refitted, result.seconds, result.canary, result.bytes),
        )
        canary = max(result.canary.values(), default=0.0)
        self._report({"refit": {"version": version, "seconds": seconds, "canary": canary}})

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


def step_credit(groups: Sequence[BufferedGroup], config: RunConfig) -> Credit:
    """The advantages of a step's groups; an unknown score is NaN."""
    sources = dict.fromkeys(name for group in groups for name in group.components)
    unknown = (math.nan,) * config.grpo.num_generations_per_prompt
    return step_advantages(
        [group.rewards for group in groups],
        config.grpo,
        lengths=[group.lengths for group in groups],
        truncated=[group.truncated for group in groups],
        components={name: [group.components.get(name, unknown) for group in groups] for name in sources},
        weights=config.reward_weights,
    )
