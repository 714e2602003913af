"""The supervisor of a run: policy, engines, trainer, leases, evaluations, until the last step or a reason to stop.

    prepare policy ─▶ start engines ─▶ attempt: claim ─▶ trainer ─▶ cold refit ─▶ leases ⇄ steps ─▶ last evaluation

Contract: this is the whole pipeline, with a Prefect server or without; `Control` is the only difference. Leaving it
for whatever reason ends every child process. It keeps no state that the store does not have.
"""

import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.assets import Materialisation, record_origin, record_progress
from flows.control import Control, Stopped
from flows.dispatch import Dispatcher
from flows.engines import Engines
from flows.evaluating import Evaluating
from flows.inquest import hold_inquest
from flows.leasing import Leasing
from flows.progress import Meter, Progress
from flows.run import Run, claim_attempt, newest_checkpoint
from flows.sinks.publisher import Publisher
from flows.supervise import Child, ChildFailed
from flows.trainer import gave_up, start_trainer, trainer_failure
from grpo_core.evaluation import Evaluation
from grpo_core.metrics import finite
from grpo_core.prompts import Prompts
from grpo_core.rollout.group import Generator
from grpo_core.rollout.pool import Pool
from grpo_core.trajectory import Stamp
from storage import layout
from storage.attempts import AttemptClaim, Fence
from storage.checkpoints import Manifest
from storage.errors import ObjectMissing, StorageError
from storage.layout import CheckpointName
from storage.metrics import Point
from storage.trajectories import TrajectoryStore

# A trainer that dies twice within this time has a fault that a third start would only repeat.
PATIENCE_SECONDS = 600.0
# Steps that the live view and the artifacts can show.
HISTORY = 50


class RunFailed(RuntimeError):
    """The run cannot go on; the message names the culprit."""


@dataclass(slots=True)
class Attempt:
    """One life of the trainer, with the leases and the evaluations that belong to it."""

    claim: AttemptClaim
    fence: Fence
    leasing: Leasing
    dispatcher: Dispatcher
    evaluating: Evaluating
    trainer: Child


class Pipeline:
    """One call of a run, from its store to its end."""

    def __init__(
        self,
        run: Run,
        prompts: Prompts,
        generator: Generator,
        engines: Engines,
        router: Pool,
        control: Control,
        logs: Path,
        publisher: Publisher,
    ) -> None:
        self._run = run
        self._config = run.config
        self._control = control
        self._engines = engines
        self._router = router
        self._logs = logs
        self._publisher = publisher
        self._prompts = prompts
        self._generator = generator
        self._meter = Meter()
        self._began = time.monotonic()
        self._shown = 0.0
        self._history: deque[dict[str, float | None]] = deque(maxlen=HISTORY)
        self._origin: Materialisation | None = None
        self._resumed_from: CheckpointName | None = None

    def finish(self, policy: Callable[[], Path], *, after: int) -> None:
        """Run to the last step and the last evaluation. Raise Stopped, RunFailed or what a component raised.

        `after` is the newest attempt that was there when this call found the run free.
        """
        self._wait_for_engines()
        directory = policy()
        self._origin = record_origin(self._run, directory)
        died: tuple[float, CheckpointName | None] | None = None
        while True:
            try:
                self._attempt(directory, after)
                record_progress(self._run, self._origin)
                return
            except ChildFailed as failure:
                if died is not None and time.monotonic() - died[0] < PATIENCE_SECONDS:
                    raise RunFailed(
                        f"the trainer died twice within {PATIENCE_SECONDS / 60:.0f} minutes: {failure}"
                    ) from failure
                if died is not None and died[1] == self._resumed_from:
                    raise RunFailed(
                        f"the trainer died twice without a new checkpoint in between: {failure}"
                    ) from failure
                died, after = (time.monotonic(), self._resumed_from), after + 1
                self._control.warn(f"{failure}\nA new attempt continues from the newest checkpoint.")

    def _wait_for_engines(self) -> None:
        """Engines need longest to start; wait for the first answer of each before the trainer's own start-up."""
        while not self._engines.all_ready():
            self._engines.probe()
            self._heed(None)
            self._show(None, "starting engines")
            time.sleep(self._run.store.poll_seconds)

    def _attempt(self, policy: Path, after: int) -> None:
        """One life of the trainer. Raise ChildFailed when it dies."""
        attempt = self._begin(policy, after)
        try:
            while (status := attempt.trainer.poll()) is None:
                self._round(attempt)
                time.sleep(self._run.store.poll_seconds)
            self._observe(attempt)
            if attempt.leasing.last_step < 1:
                raise RunFailed(
                    f"the data of run {self._config.run_id} ended, {attempt.leasing.frontier.counts().settled} prompts of them dropped, before they filled one step of "
                    f"grpo.num_prompts_per_step={self._config.grpo.num_prompts_per_step}; lower it or raise grpo.max_num_epochs"
                )
            if status != 0:
                # A trainer that a newer attempt fenced died as it should; another one would fence that attempt.
                attempt.fence.check()
                failure = trainer_failure(attempt.trainer, self._logs)
                raise RunFailed(str(failure)) if gave_up(self._logs) else failure
            if attempt.evaluating.goal is None and attempt.leasing.steps_done < attempt.leasing.last_step:
                raise Stopped("cancel", attempt.leasing.steps_done)
            self._last_evaluation(attempt)
        finally:
            attempt.dispatcher.stop.set()
            attempt.trainer.stop()
            self._note_end(attempt)

    def _note_end(self, attempt: Attempt) -> None:
        """Leave word that we did not die, so that nobody is suspected of having killed us."""
        try:
            self._write_progress(attempt, {"ended": True})
        except StorageError as error:
            self._control.warn(f"the end of attempt {attempt.claim.attempt} could not be recorded: {error}")

    def _begin(self, policy: Path, after: int) -> Attempt:
        """Claim the attempt and start its trainer."""
        store, keep = self._run.store, self._config.checkpointing.load_replay_buffer
        parent = newest_checkpoint(self._run, self._control.warn)
        self._resumed_from = None if parent is None else parent.name
        claim = claim_attempt(self._run, parent, after=after)
        fence = Fence(store, claim.attempt)
        leasing = Leasing(store, claim.attempt, self._run.window, self._prompts, parent, keep_buffered=keep)
        leasing.heed(
            hold_inquest(
                store, claim.attempt - 1, lives=self._config.generation.max_rollout_attempts, leasable=leasing.leasable
            )
        )
        trajectories = TrajectoryStore(
            store, claim.attempt, fence=fence.check, metadata={"run_id": self._config.run_id}
        )
        dispatcher = Dispatcher(
            leasing=leasing,
            trajectories=trajectories,
            generator=self._generator,
            stream=self._prompts,
            control=self._control,
            on_tokens=lambda count: self._meter.tokens(count, time.monotonic()),
        )
        self._control.say(f"attempt {claim.attempt} of {self._config.run_id} continues from {_start(parent)}")
        evaluating = Evaluating(
            self._config,
            store,
            claim.attempt,
            held_out=self._run.splits.held_out,
            generator=self._generator,
            control=self._control,
            stopped=dispatcher.stop.is_set,
            publish=self._publish_evaluation,
        )
        self._engines.begin_attempt()
        trainer = start_trainer(self._run, claim.attempt, policy, self._logs)
        self._control.watch(f"trainer-{claim.attempt}", trainer.poll)
        return Attempt(claim, fence, leasing, dispatcher, evaluating, trainer)

    def _round(self, attempt: Attempt) -> None:
        self._tend(attempt)
        attempt.dispatcher.collect()
        if attempt.leasing.live is None:
            self._show(attempt, "first refit")
        elif attempt.evaluating.first(attempt.leasing.steps_done, leased=attempt.leasing.leased):
            self._show(attempt, "evaluating version 0")
        elif attempt.evaluating.goal is not None:
            self._show(attempt, "goal reached, ending")
        else:
            attempt.evaluating.beside_training(attempt.leasing.live.version)
            attempt.dispatcher.dispatch()
            self._show(attempt, "training")

    def _tend(self, attempt: Attempt) -> None:
        """What must go on whatever the run is doing: listen, observe, and look after the engines."""
        self._heed(attempt)
        self._observe(attempt)
        self._replace_broken(attempt)
        self._engines.watch(self._run.store, attempt.claim.attempt, attempt.leasing.live)

    def _heed(self, attempt: Attempt | None) -> None:
        """Stop in good order when asked to: the trainer first, because it has a checkpoint to write."""
        wish = self._control.wish()
        if wish == "run":
            return
        if attempt is not None:
            attempt.dispatcher.stop.set()
            attempt.trainer.stop()
        raise Stopped(wish, 0 if attempt is None else attempt.leasing.steps_done)

    def _observe(self, attempt: Attempt) -> None:
        for footer in attempt.leasing.observe():
            self._meter.step(footer, time.monotonic())
            self._history.append({"step": float(footer.name.step), **footer.metrics})
            self._publish(attempt, footer.name.step, finite(footer.metrics) | self._pool_metrics())
            # The checkpoint of a step is committed after its ledger, so it is there by the time of the next step.
            if self._origin is not None and (footer.name.step - 1) % self._config.checkpointing.save_period == 0:
                record_progress(self._run, self._origin)
        live = attempt.leasing.live
        if live is not None and Stamp(live.attempt, live.version) != self._router.stamp:
            self._router.live(Stamp(live.attempt, live.version), live.engines)
        self._engines.cancel_overdue(self._run.window.oldest_version(attempt.leasing.steps_done + 1))

    def _publish(self, attempt: Attempt, step: int, metrics: dict[str, float]) -> None:
        version = step // self._config.refit.every_steps
        self._publisher.publish(Point(attempt.claim.attempt, step, version, time.time(), metrics))

    def _publish_evaluation(self, found: Evaluation) -> None:
        self._publisher.publish(Point(found.attempt, found.step, found.version, time.time(), found.metrics()))

    def _pool_metrics(self) -> dict[str, float]:
        return self._meter.metrics(time.monotonic()) | self._engines.metrics() | self._generator.rewards.metrics()

    def _replace_broken(self, attempt: Attempt) -> None:
        """Engines that the trainer found broken in a refit must not be used again."""
        try:
            report = json.loads(self._run.store.get(layout.progress(attempt.claim.attempt, "trainer")))
        except ObjectMissing:
            return
        self._engines.replace(report.get("broken_engines", {}))

    def _last_evaluation(self, attempt: Attempt) -> None:
        version = attempt.leasing.steps_done // self._config.refit.every_steps
        while attempt.evaluating.last(version):
            self._tend(attempt)
            self._show(attempt, f"evaluating version {version}")
            time.sleep(self._run.store.poll_seconds)

    def _show(self, attempt: Attempt | None, phase: str) -> None:
        """Refresh the view and our sign of life, about once a second."""
        moment = time.monotonic()
        full = attempt is not None and attempt.leasing.window_full
        self._meter.sample(moment, busy=self._router.load() > 0, window_full=full)
        if moment - self._shown < self._config.logging.progress_seconds:
            return
        self._shown = moment
        progress = self._progress(attempt, phase, moment)
        if attempt is not None:
            attempt.fence.check()
            self._write_progress(
                attempt,
                {"phase": phase, "step": progress.step, "tokens_per_second": progress.tokens_per_second},
            )
        self._control.show(progress)

    def _write_progress(self, attempt: Attempt, fields: Mapping[str, Any]) -> None:
        record = {"at": time.time(), "pid": os.getpid(), **fields}
        self._run.store.put(layout.progress(attempt.claim.attempt, "flow"), json.dumps(record).encode())

    def _progress(self, attempt: Attempt | None, phase: str, moment: float) -> Progress:
        leasing = attempt.leasing if attempt is not None else None
        counts = leasing.frontier.counts() if leasing is not None else None
        newest = leasing.newest if leasing is not None else None
        totals = newest.totals if newest is not None else None
        step = leasing.steps_done if leasing is not None else 0
        steps = leasing.last_step if leasing is not None else self._run.window.last_step()
        pace = self._meter.seconds_per_step(moment)
        return Progress(
            run_id=self._config.run_id,
            phase=phase,
            attempt=attempt.claim.attempt if attempt is not None else 0,
            step=step,
            steps=steps,
            version=leasing.live.version if leasing is not None and leasing.live is not None else 0,
            reward=totals.reward_last if totals is not None else None,
            lag_mean=(totals.lag_mean or 0.0) if totals is not None else 0.0,
            lag_max=max(totals.lag_tokens, default=0) if totals is not None else 0,
            tokens_per_second=self._meter.tokens_per_second(moment),
            trainer_utilisation=self._meter.trainer_utilisation(moment),
            engine_utilisation=self._meter.engine_utilisation(moment),
            in_flight=counts.in_flight if counts is not None else 0,
            buffered=counts.buffered if counts is not None else 0,
            eta_seconds=None if pace is None else pace * (steps - step),
            elapsed_seconds=moment - self._began,
            metrics=(self._history[-1] if self._history else {}) | self._pool_metrics(),
            history=tuple(self._history),
            evaluation=attempt.evaluating.newest if attempt is not None else None,
        )


def _start(parent: Manifest | None) -> str:
    return "version 0" if parent is None else f"the checkpoint of step {parent.step} of attempt {parent.attempt}"
