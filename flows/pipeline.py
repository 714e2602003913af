"""The supervisor of a run: policy, engines, trainer, leases, evaluations, until the last step or a reason to stop.

    prepare policy ─▶ start engines ─▶ attempt: claim ─▶ trainer ─▶ cold refit ─▶ leases ⇄ steps ─▶ last evaluation

Contract: this is the whole pipeline, with a Prefect server or without; `Control` is the only difference. Leaving it
for whatever reason ends every child process. It keeps no state that the store does not have.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from flows.control import Control, Dispatched, Stopped
from flows.engines import Engines
from flows.evaluate import evaluate
from flows.generate import LeaseJob, LeaseResult
from flows.leasing import Leasing
from flows.progress import Meter, Progress
from flows.run import Run, claim_attempt, has_evaluation, newest_checkpoint
from flows.supervise import Child, ChildFailed, Command
from grpo_core.prompts import PromptStream
from grpo_core.rollout.chat import Chat
from grpo_core.rollout.group import Generator
from grpo_core.rollout.pool import Pool
from grpo_core.rollout.rewards import RewardWorkers
from grpo_core.trajectory import Stamp
from storage import layout
from storage.attempts import AttemptClaim, Fence
from storage.errors import ObjectMissing
from storage.trajectories import TrajectoryStore

# A trainer that dies twice within this time has a fault that a third start would only repeat.
PATIENCE_SECONDS = 600.0
# With the engines’ own grace after it, the whole run is gone within fifteen seconds; a trainer in the middle of a longer
# step loses that step, which the next attempt repeats.
TRAINER_GRACE_SECONDS = 8.0


class RunFailed(RuntimeError):
    """The run cannot go on; the message names the culprit."""


@dataclass(frozen=True, slots=True)
class Policies:
    """Directories of version 0: `skeleton` has the right shapes and tokenizer early, `initial` the right weights."""

    skeleton: Path
    initial: Path


@dataclass(frozen=True, slots=True)
class OpenLease:
    """A dispatched lease. `expired` tells its task that it was sealed; `deadline` is on the monotonic clock."""

    job: LeaseJob
    future: Dispatched[LeaseResult]
    expired: threading.Event
    deadline: float


@dataclass(slots=True)
class Attempt:
    """One life of the trainer and the leases that belong to it."""

    claim: AttemptClaim
    leasing: Leasing
    trainer: Child
    trajectories: TrajectoryStore
    stop: threading.Event = field(default_factory=threading.Event)
    leases: dict[int, OpenLease] = field(default_factory=dict)


class Pipeline:
    """One call of a run, from its store to its end."""

    def __init__(
        self, run: Run, chat: Chat, engines: Engines, router: Pool, rewards: RewardWorkers, control: Control, logs: Path
    ) -> None:
        self._run = run
        self._config = run.config
        self._control = control
        self._engines = engines
        self._router = router
        self._logs = logs
        self._stream = PromptStream(run.splits.train, seed=run.config.data.seed, shuffle=run.config.data.shuffle)
        self._generator = Generator(run.config, chat, router, rewards)
        self._meter = Meter()
        self._began = time.monotonic()
        self._shown = 0.0
        self._history: list[dict[str, float | None]] = []
        self._failed_groups = 0

    def finish(self, policy: Callable[[], Path], *, after: int) -> None:
        """Run to the last step and the last evaluation. Raise Stopped, RunFailed or what a component raised.

        `after` is the newest attempt that was there when this call found the run free.
        """
        self._wait_for_engines()
        directory = policy()
        died_at: float | None = None
        while True:
            try:
                self._attempt(directory, after)
                return
            except ChildFailed as failure:
                if died_at is not None and time.monotonic() - died_at < PATIENCE_SECONDS:
                    raise RunFailed(
                        f"the trainer died twice within {PATIENCE_SECONDS / 60:.0f} minutes: {failure}"
                    ) from failure
                died_at, after = time.monotonic(), after + 1
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
        parent = newest_checkpoint(self._run, self._control.warn)
        claim = claim_attempt(self._run, parent, after=after)
        self._engines.begin_attempt()
        failure_file(self._logs).unlink(missing_ok=True)
        fence = Fence(self._run.store, claim.attempt)
        attempt = Attempt(
            claim=claim,
            leasing=Leasing(
                self._run.store,
                claim.attempt,
                self._run.window,
                parent,
                keep_buffered=self._config.checkpointing.load_replay_buffer,
            ),
            trainer=Child(trainer_command(self._run, claim.attempt, policy, self._logs)),
            trajectories=TrajectoryStore(
                self._run.store, claim.attempt, fence=fence.check, metadata={"run_id": self._config.run_id}
            ),
        )
        self._control.watch(f"trainer-{claim.attempt}", attempt.trainer.poll)
        try:
            while (status := attempt.trainer.poll()) is None:
                self._round(attempt, fence)
                time.sleep(self._run.store.poll_seconds)
            self._observe(attempt)
            if status != 0:
                # A trainer that a newer attempt fenced died as it should; another one from here would fence that attempt.
                fence.check()
                raise self._trainer_failure(attempt.trainer)
            self._last_evaluation(attempt)
        finally:
            attempt.stop.set()
            attempt.trainer.stop()
            self._show(attempt, "stopping", now=True)

    def _trainer_failure(self, trainer: Child) -> ChildFailed:
        """What ended the trainer: a rank's own words if it left any, because torchrun's last lines are about torchrun."""
        words = failure_file(self._logs)
        if words.exists():
            return ChildFailed(f"the trainer failed: {words.read_text(encoding='utf-8')}; see {trainer.command.log}")
        return trainer.failure()

    def _round(self, attempt: Attempt, fence: Fence) -> None:
        self._heed(attempt)
        self._observe(attempt)
        self._replace_broken(attempt)
        self._engines.watch(self._run.store, attempt.claim.attempt, attempt.leasing.live)
        self._collect(attempt)
        if attempt.leasing.live is not None:
            self._first_evaluation(attempt)
            self._dispatch(attempt)
        self._show(attempt, "training" if attempt.leasing.live is not None else "first refit", fence=fence)

    def _heed(self, attempt: Attempt | None) -> None:
        """Stop in good order when asked to: the trainer first, because it has a checkpoint to write."""
        wish = self._control.wish()
        if wish == "run":
            return
        step = 0
        if attempt is not None:
            attempt.stop.set()
            attempt.trainer.stop()
            attempt.leasing.observe()
            step = attempt.leasing.steps_done
        raise Stopped(wish, step)

    def _observe(self, attempt: Attempt) -> None:
        for footer in attempt.leasing.observe():
            self._meter.step(footer, time.monotonic())
            self._history.append({"step": float(footer.name.step), **footer.metrics})
        live = attempt.leasing.live
        if live is not None and (
            self._router.stamp is None
            or (live.attempt, live.version) != (self._router.stamp.attempt, self._router.stamp.version)
        ):
            self._router.live(Stamp(live.attempt, live.version), live.engines)

    def _replace_broken(self, attempt: Attempt) -> None:
        """Engines that the trainer found broken in a refit must not be used again."""
        try:
            report = json.loads(self._run.store.get(layout.progress(attempt.claim.attempt, "trainer")))
        except ObjectMissing:
            return
        self._engines.replace(report.get("broken_engines", {}))

    def _dispatch(self, attempt: Attempt) -> None:
        while (record := attempt.leasing.next_lease(self._config.lease_prompts)) is not None:
            expired = threading.Event()
            job = LeaseJob(
                record=record,
                generator=self._generator,
                stream=self._stream,
                trajectories=attempt.trajectories,
                stopped=partial(_any_set, expired, attempt.stop),
                on_tokens=lambda count: self._meter.tokens(count, time.monotonic()),
            )
            deadline = time.monotonic() + self._config.generation.lease_timeout_seconds
            attempt.leases[record.lease] = OpenLease(job, self._control.dispatch(job), expired, deadline)

    def _collect(self, attempt: Attempt) -> None:
        """Take in finished leases; seal those that failed or expired, so that what is missing is leased again."""
        for number, lease in list(attempt.leases.items()):
            if not lease.future.done():
                if time.monotonic() > lease.deadline:
                    lease.expired.set()
                    self._seal(attempt, lease, "expired")
                continue
            try:
                result = lease.future.result()
            except Exception as error:  # noqa: BLE001 - whatever a task raises comes back here, and costs its lease alone
                self._seal(attempt, lease, f"failed ({type(error).__name__}: {error})")
                continue
            del attempt.leases[number]
            attempt.leasing.arrived(result.arrived)
            if failed := sum(result.failures.values()):
                self._count_failures(failed, next(iter(result.failures)))
            if failed < len(result.arrived):
                self._failed_groups = 0

    def _seal(self, attempt: Attempt, lease: OpenLease, why: str) -> None:
        """End a lease in place of its task. Its last part says which ordinals go back."""
        record = lease.job.record
        del attempt.leases[record.lease]
        if attempt.stop.is_set():
            return
        footer = attempt.trajectories.seal(record.lease, record.ordinals)
        attempt.leasing.arrived(tuple(set(record.ordinals) - set(footer.returned)))
        attempt.leasing.returned(footer.returned)
        self._control.warn(f"lease {record.lease} {why}; {len(footer.returned)} of its ordinals are leased again")
        self._count_failures(1, f"lease {record.lease} {why}")

    def _count_failures(self, count: int, cause: str) -> None:
        self._failed_groups += count
        limit = self._config.grpo.async_grpo.max_generation_failures
        if self._failed_groups > limit:
            raise RunFailed(
                f"{self._failed_groups} groups failed in a row, more than grpo.async_grpo.max_generation_failures={limit}; the cause was: {cause}"
            )

    def _first_evaluation(self, attempt: Attempt) -> None:
        """Version 0 is evaluated before the first lease, so that nothing else changes meanwhile."""
        leasing = attempt.leasing
        if (
            self._config.evaluation.at_start
            and leasing.steps_done == 0
            and not attempt.leases
            and not self._evaluated(0)
        ):
            self._evaluate(attempt, 0)

    def _last_evaluation(self, attempt: Attempt) -> None:
        version = self._run.steps // self._config.refit.every_steps
        if attempt.leasing.steps_done < self._run.steps:
            raise Stopped("cancel", attempt.leasing.steps_done)
        if self._config.evaluation.at_end and not self._evaluated(version):
            self._evaluate(attempt, version)

    def _evaluated(self, version: int) -> bool:
        return has_evaluation(self._run.store, version, self._config.refit.every_steps)

    def _evaluate(self, attempt: Attempt, version: int) -> None:
        """Evaluate, still listening to whoever may want us to stop."""
        if not self._run.splits.held_out:
            return
        work = partial(
            evaluate,
            self._generator,
            self._run.splits.held_out,
            self._run.store,
            attempt=attempt.claim.attempt,
            version=version,
        )
        future = self._control.evaluate(version, work)
        while not future.done():
            self._heed(attempt)
            self._show(attempt, f"evaluating version {version}")
            time.sleep(self._run.store.poll_seconds)
        self._control.say(future.result().line())

    def _show(self, attempt: Attempt | None, phase: str, *, now: bool = False, fence: Fence | None = None) -> None:
        """Refresh the view and our sign of life, about once a second."""
        moment = time.monotonic()
        self._meter.engines(self._router.load() > 0, moment)
        if not now and moment - self._shown < self._config.logging.progress_seconds:
            return
        self._shown = moment
        progress = self._progress(attempt, phase, moment)
        if attempt is not None:
            if fence is not None:
                fence.check()
            record = {
                "at": time.time(),
                "pid": os.getpid(),
                "phase": phase,
                "step": progress.step,
                "tokens_per_second": progress.tokens_per_second,
            }
            self._run.store.put(layout.progress(attempt.claim.attempt, "flow"), json.dumps(record).encode())
        self._control.show(progress)

    def _progress(self, attempt: Attempt | None, phase: str, moment: float) -> Progress:
        leasing = attempt.leasing if attempt is not None else None
        counts = leasing.frontier.counts() if leasing is not None else None
        newest = leasing.newest if leasing is not None else None
        totals = newest.totals if newest is not None else None
        step = leasing.steps_done if leasing is not None else 0
        pace = self._meter.seconds_per_step(moment)
        return Progress(
            run_id=self._config.run_id,
            phase=phase,
            attempt=attempt.claim.attempt if attempt is not None else 0,
            step=step,
            steps=self._run.steps,
            version=leasing.live.version if leasing is not None and leasing.live is not None else 0,
            reward=totals.reward_last if totals is not None else None,
            lag_mean=(totals.lag_mean or 0.0) if totals is not None else 0.0,
            lag_max=max(totals.lag_tokens, default=0) if totals is not None else 0,
            tokens_per_second=self._meter.tokens_per_second(moment),
            trainer_utilisation=self._meter.trainer_utilisation(moment),
            engine_utilisation=self._meter.engine_utilisation(moment),
            in_flight=counts.in_flight if counts is not None else 0,
            buffered=counts.buffered if counts is not None else 0,
            eta_seconds=None if pace is None else pace * (self._run.steps - step),
            elapsed_seconds=moment - self._began,
            metrics=self._history[-1] if self._history else {},
            history=tuple(self._history[-50:]),
        )


def _any_set(*events: threading.Event) -> bool:
    return any(event.is_set() for event in events)


def failure_file(logs: Path) -> Path:
    """Where the first rank that fails says why."""
    return logs / "trainer.failure"


def trainer_command(run: Run, attempt: int, policy: Path, logs: Path) -> Command:
    """The torchrun group of one attempt. Pure."""
    config = run.config
    training = config.training
    python = str(training.python or sys.executable)
    group = [f"--nproc-per-node={training.ranks}", "--max-restarts=0"]
    if training.nodes > 1:
        group += [
            f"--nnodes={training.nodes}",
            "--node-rank=0",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={training.rendezvous}",
        ]
    else:
        group += ["--standalone"]
    arguments = [
        *(python, "-m", "torch.distributed.run", *group, "-m", "grpo_core.training"),
        *("--root", config.storage.root, "--run-id", config.run_id, "--attempt", str(attempt), "--policy", str(policy)),
        *("--storage-options", json.dumps(config.storage.options), "--storage-client", config.storage.client),
        *("--failure-file", str(failure_file(logs))),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(training.threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return Command("trainer", arguments, environment, logs / "trainer.log", grace_seconds=TRAINER_GRACE_SECONDS)
