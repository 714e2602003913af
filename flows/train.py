"""The training flow: what a Prefect deployment runs, and what `forebay train` calls.

Prefect is the control plane. One task run per lease, one per child process and one per evaluation make the timeline;
a progress artifact, a table of metrics and one line of log now and then make the page. No state lives here.
"""

import contextvars
import json
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from logging import Logger, LoggerAdapter
from typing import Any
from uuid import UUID

import httpx
from prefect import flow, get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import Pause, PrefectException
from prefect.futures import PrefectConcurrentFuture, PrefectFuture
from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled, Completed, Failed
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner
from prefect.utilities.annotations import quote
from pydantic import ValidationError

from flows.artifacts import Artifacts
from flows.assembly import Summary, run_to_end
from flows.control import MAX_LEASES, Dispatched, Signals, Stopped, Wish
from flows.evaluate import EvaluationJob, EvaluationStopped
from flows.generate import LeaseJob, LeaseResult, LeaseStopped
from flows.live import LiveView
from flows.progress import Progress
from grpo_core.config import RunConfig
from grpo_core.evaluation import Evaluation

# Threads are made when they are needed; a lease or a watched process holds one each.
RUNNER: TaskRunner[Any] = ThreadPoolTaskRunner(max_workers=2 * MAX_LEASES)
POLL_SECONDS = 2.0
REQUEST_SECONDS = 5.0
# A server may hesitate this long before anybody hears of it.
SILENCE_SECONDS = 10.0
# What may go wrong between us and a server that is away, or of another age so that its answers are not JSON or lack a
# field; everything else is a fault of ours.
SERVER_AWAY = (httpx.HTTPError, PrefectException, OSError, json.JSONDecodeError, ValidationError)
# The signals of the command that calls the flow, if one does. What came before the flow ran counts in it, and what
# ends the flow is the command's exit status.
COMMAND: ContextVar[Signals | None] = ContextVar("command", default=None)
# How a process ends that has done its work, or was told to stop because the others have.
GOOD_ENDS = (0, -signal.SIGTERM, 128 + signal.SIGTERM)


@task(name="generate_shard", task_run_name="lease-{lease:06d}", cache_policy=NO_CACHE, persist_result=False)
def generate_shard(job: LeaseJob, lease: int) -> LeaseResult | State[Any]:
    """One lease: its prompts become scored groups in immutable parts."""
    try:
        return job.run()
    except LeaseStopped as stopped:
        return Cancelled(message=str(stopped))


@task(name="evaluate", task_run_name="evaluate-{version:06d}", cache_policy=NO_CACHE, persist_result=False)
def evaluate_version(job: EvaluationJob, version: int) -> Evaluation | State[Any]:
    """One version on the held-out split."""
    try:
        return job.run()
    except EvaluationStopped as stopped:
        return Cancelled(message=str(stopped))


@task(name="process", task_run_name="{name}", cache_policy=NO_CACHE, persist_result=False)
def watch_process(poll: Callable[[], int | None], stopping: Callable[[], bool], name: str) -> State[Any]:
    """A bar in the timeline for as long as a child process lives; the supervisor itself decides about it."""
    while (status := poll()) is None:
        time.sleep(0.5)
    # A process that is told to stop may say so by its status: torchrun exits with 1.
    if status in GOOD_ENDS or stopping():
        return Completed(message=f"{name} ended")
    return Failed(message=f"{name} exited with status {status}" if status > 0 else f"{name} was killed by {-status}")


@flow(name="train", flow_run_name="{config.run_id}", task_runner=RUNNER)
def train(config: RunConfig, take_over: bool = False) -> Summary | State[Any]:
    """Run, or continue, the run `config.run_id` to its configured end.

    Args:
        config: The whole recipe; the same run_id continues the run from its newest checkpoint.
        take_over: Fence a flow that seems to own the run, even while it shows signs of life.
    """
    logger = get_run_logger()
    with flow_signals() as signals, LiveView() as view, PrefectControl(config, signals, view, logger) as control:
        try:
            summary = run_to_end(config, control, take_over=take_over)
        except Stopped as stopped:
            logger.warning(str(stopped))
            if stopped.wish == "suspend":
                raise Pause(state=control.state) from None
            return Cancelled(message=str(stopped))
    logger.info(summary.text())
    return summary


@contextmanager
def flow_signals() -> Generator[Signals, None, None]:
    """The signals of this flow run, in which those of the command that called it count too."""
    command = COMMAND.get()
    with Signals() as signals:
        if command is not None:
            signals.number = command.number
        try:
            yield signals
        finally:
            if command is not None:
                command.number = signals.number


class PrefectControl:
    """A flow run as the supervisor's surroundings. All talk with the server happens on one background thread."""

    def __init__(
        self, config: RunConfig, signals: Signals, view: LiveView, logger: Logger | LoggerAdapter[Logger]
    ) -> None:
        self._signals = signals
        self._view = view
        self._logger = logger
        self._flow_run_id = UUID(runtime.flow_run.id)
        self._artifacts = Artifacts(config.run_id, self._flow_run_id)
        self._artifact_seconds = config.logging.artifact_seconds
        self._due = time.monotonic()
        self._newest: Progress | None = None
        self._closed = threading.Event()
        self.state: State[Any] | None = None
        self._fault: Exception | None = None
        # The settings in force, and so the server, are those of the context.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="prefect-control", daemon=True)

    def wish(self) -> Wish:
        """Whether to go on. Raise what ended the talk with the server, which no outage explains."""
        if self._fault is not None:
            raise self._fault
        state = self.state
        if self._signals.number or (state is not None and (state.is_cancelling() or state.is_cancelled())):
            return "cancel"
        # A run that is scheduled while we run was suspended and resumed between two of our questions: a new process
        # is about to continue it.
        return "suspend" if state is not None and (state.is_paused() or state.is_scheduled()) else "run"

    def dispatch(self, job: LeaseJob) -> Dispatched[LeaseResult]:
        return TaskFuture(generate_shard.submit(job=quoted(job), lease=job.record.lease))

    def evaluate(self, job: EvaluationJob) -> Dispatched[Evaluation]:
        return TaskFuture(evaluate_version.submit(job=quoted(job), version=job.stamp.version))

    def watch(self, name: str, poll: Callable[[], int | None]) -> None:
        watch_process.submit(poll=quoted(poll), stopping=quoted(lambda: self.wish() != "run"), name=name)

    def show(self, progress: Progress) -> None:
        self._newest = progress
        self._view.show(progress)

    def say(self, message: str) -> None:
        self._logger.info(message)

    def warn(self, message: str) -> None:
        self._logger.warning(message)

    def _run(self) -> None:
        try:
            self._talk()
        except Exception as error:  # noqa: BLE001 - it would end this thread unheard, and cancellation with it
            self._fault = error

    def _talk(self) -> None:
        """Ask for our state and refresh the artifacts; while the server is away, keep the last answer and ask again."""
        # This loop is the retry. The client's own pauses grow, and after an outage would keep a cancellation waiting.
        patience = {PREFECT_CLIENT_MAX_RETRIES: 0, PREFECT_API_REQUEST_TIMEOUT: REQUEST_SECONDS}
        # Settings of our own make it a client of our own: the flow's belongs to the main thread.
        with temporary_settings(patience), get_client(sync_client=True, httpx_settings={}) as client:
            heard, away = time.monotonic(), False
            while not self._closed.wait(POLL_SECONDS):
                try:
                    self.state = client.read_flow_run(self._flow_run_id).state
                    self._draw(client)
                except SERVER_AWAY as error:
                    if not away and time.monotonic() - heard > SILENCE_SECONDS:
                        away = True
                        self._logger.warning(f"the Prefect server does not answer ({error!r}); training goes on")
                else:
                    if away:
                        self._logger.info(f"the Prefect server answers again after {time.monotonic() - heard:.0f} s")
                    heard, away = time.monotonic(), False
            try:
                self._draw(client, last=True)
            except SERVER_AWAY as error:
                self._logger.warning(f"the last artifacts were not stored: the Prefect server said {error!r}")

    def _draw(self, client: SyncPrefectClient, *, last: bool = False) -> None:
        if self._newest is not None and (last or time.monotonic() >= self._due):
            self._artifacts.draw(client, self._newest)
            self._due = time.monotonic() + self._artifact_seconds

    def __enter__(self) -> "PrefectControl":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        self._thread.join(timeout=4 * REQUEST_SECONDS)


def quoted(value: Any) -> Any:
    """An argument Prefect hands over as it is; it would otherwise look for futures
    in everything the value refers to."""
    return quote(value)


class TaskFuture:
    """A Prefect future seen as dispatched work."""

    def __init__(self, future: PrefectFuture[Any]) -> None:
        assert isinstance(future, PrefectConcurrentFuture)  # what a ThreadPoolTaskRunner returns
        self._future = future

    def done(self) -> bool:
        return self._future.wrapped_future.done()

    def result(self) -> Any:
        return self._future.result()
