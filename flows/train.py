"""The training flow: what a Prefect deployment runs, and what `forebay train` calls.

Prefect is the control plane. One task run per lease, one per child process and one per evaluation make the timeline;
a progress artifact, a table of metrics and one line of log now and then make the page. No state lives here.
"""

import contextvars
import threading
import time
from collections.abc import Callable
from logging import Logger, LoggerAdapter
from typing import Any

import anyio
import httpx
from prefect import flow, get_run_logger, runtime, task
from prefect.artifacts import create_progress_artifact, create_table_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import Pause, PrefectException
from prefect.futures import PrefectConcurrentFuture
from prefect.states import Cancelled
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.utilities.annotations import quote

from flows.assembly import Summary, run_to_end
from flows.control import LeaseFuture, Signals, Stopped, Wish
from flows.evaluate import Evaluation
from flows.generate import LeaseJob, LeaseResult
from flows.live import LiveView
from flows.progress import Progress
from grpo_core.config import RunConfig

# Threads are made when they are needed; a lease or a watched process holds one each.
MAX_TASKS = 256
RUNNER: ThreadPoolTaskRunner[Any] = ThreadPoolTaskRunner(max_workers=MAX_TASKS)
POLL_SECONDS = 2.0
TABLE_ROWS = 50
# What may go wrong between us and a server that is away; everything else is a fault of ours and shows.
SERVER_AWAY = (httpx.HTTPError, PrefectException, OSError, TimeoutError, anyio.EndOfStream)


@task(name="generate_shard", task_run_name="lease-{lease:06d}", cache_policy=NO_CACHE, persist_result=False)
def generate_shard(job: LeaseJob, lease: int) -> LeaseResult:
    """One lease: its prompts become scored groups in immutable parts."""
    return job.run()


@task(name="evaluate", task_run_name="evaluate", cache_policy=NO_CACHE, persist_result=False)
def evaluate_version(work: Callable[[], Evaluation]) -> Evaluation:
    """One version on the held-out split."""
    return work()


@task(name="process", task_run_name="{name}", cache_policy=NO_CACHE, persist_result=False)
def watch_process(poll: Callable[[], int | None], name: str) -> int:
    """A bar in the timeline for as long as a child process lives; the supervisor itself decides about it."""
    while (status := poll()) is None:
        time.sleep(0.5)
    return status


@flow(name="train", flow_run_name="{config.run_id}", task_runner=ThreadPoolTaskRunner(max_workers=MAX_TASKS))
def train(config: RunConfig, take_over: bool = False) -> Summary | State[Any]:
    """Run, or continue, the run `config.run_id` to its configured end.

    Args:
        config: The whole recipe; the same run_id continues the run from its newest checkpoint.
        take_over: Fence a flow that seems to own the run, even while it shows signs of life.
    """
    logger = get_run_logger()
    with Signals() as signals, LiveView() as view, PrefectControl(config, signals, view, logger) as control:
        try:
            summary = run_to_end(config, control, take_over=take_over)
        except Stopped as stopped:
            logger.warning(str(stopped))
            if stopped.wish == "suspend":
                raise Pause(state=control.state) from None
            return Cancelled(message=str(stopped))
    logger.info(summary.text())
    return summary


class PrefectControl:
    """A flow run as the supervisor's surroundings. All talk with the server happens on one background thread."""

    def __init__(
        self, config: RunConfig, signals: Signals, view: LiveView, logger: Logger | LoggerAdapter[Logger]
    ) -> None:
        self._config = config
        self._signals = signals
        self._view = view
        self._logger = logger
        self._flow_run_id = runtime.flow_run.id
        self._newest: Progress | None = None
        self._closed = threading.Event()
        self.state: State[Any] | None = None
        # Artifacts belong to the flow run of the context they are created in.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._talk,), name="prefect-control", daemon=True)

    def wish(self) -> Wish:
        if self._signals.number or (
            self.state is not None and (self.state.is_cancelling() or self.state.is_cancelled())
        ):
            return "cancel"
        return "suspend" if self.state is not None and self.state.is_paused() else "run"

    def dispatch(self, job: LeaseJob) -> LeaseFuture:
        return TaskFuture(generate_shard.submit(job=quoted(job), lease=job.record.lease))

    def evaluate(self, work: Callable[[], Evaluation]) -> Evaluation:
        return evaluate_version(work=quoted(work))

    def watch(self, name: str, poll: Callable[[], int | None]) -> None:
        watch_process.submit(poll=quoted(poll), name=name)

    def show(self, progress: Progress) -> None:
        self._newest = progress
        self._view.show(progress)

    def say(self, message: str) -> None:
        self._logger.info(message)

    def warn(self, message: str) -> None:
        self._logger.warning(message)

    def _talk(self) -> None:
        """Ask for our state and refresh the artifacts; while the server is away, keep the last answer and try again."""
        artifact, drawn = None, 0.0
        while not self._closed.wait(POLL_SECONDS):
            try:
                with get_client(sync_client=True, httpx_settings={"timeout": 10.0}) as client:
                    self.state = client.read_flow_run(self._flow_run_id).state
                if self._newest is not None and time.monotonic() - drawn >= self._config.logging.artifact_seconds:
                    artifact = self._draw(self._newest, artifact)
                    drawn = time.monotonic()
            except SERVER_AWAY as error:
                self._logger.warning(f"the Prefect server does not answer ({type(error).__name__}); training goes on")
        if self._newest is not None:
            try:
                self._draw(self._newest, artifact)
            except SERVER_AWAY as error:
                self._logger.warning(f"the last artifacts were not stored ({type(error).__name__})")

    def _draw(self, progress: Progress, artifact: Any) -> Any:
        share = 100.0 * progress.step / progress.steps
        key = "".join(letter if letter.isalnum() else "-" for letter in progress.run_id.lower())
        description = f"{progress.phase}, step {progress.step} of {progress.steps}"
        if artifact is None:
            artifact = create_progress_artifact(share, key=f"{key}-progress", description=description)
        else:
            update_progress_artifact(artifact, progress=share, description=description)
        if progress.history:
            create_table_artifact(
                metric_table(progress),
                key=f"{key}-metrics",
                description=f"The last {TABLE_ROWS} steps of {progress.run_id}",
            )
        return artifact

    def __enter__(self) -> "PrefectControl":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        self._thread.join(timeout=15)


def quoted(value: Any) -> Any:
    """An argument Prefect hands over as it is; it would otherwise look for futures in everything the value refers to."""
    return quote(value)


def metric_table(progress: Progress) -> list[dict[str, str | None]]:
    """The last steps, newest first, as text: what the table artifact shows."""
    columns = (
        "step",
        "reward_mean",
        "loss",
        "grad_norm",
        "lag_mean",
        "lag_max",
        "entropy",
        "completion_tokens_mean",
        "step_seconds",
        "wait_seconds",
    )
    return [
        {name: None if (value := entry.get(name)) is None else f"{value:.4g}" for name in columns}
        for entry in reversed(progress.history)
    ]


class TaskFuture:
    """A Prefect future seen as a lease's."""

    def __init__(self, future: PrefectConcurrentFuture[LeaseResult]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.wrapped_future.done()

    def result(self) -> LeaseResult:
        return self._future.result()
