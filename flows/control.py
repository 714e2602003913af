"""How the supervisor talks to whoever started it: with a Prefect server, or without one.

Contract: nothing here may stop training. Prefect is told things and asked one question, "go on?", by a background
thread with a deadline; while the server is away the answer stays what it was. Exceptions of generation tasks come back
through their futures, never from here.
"""

import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Literal, Protocol, TypeVar

from flows.evaluate import EvaluationJob
from flows.generate import LeaseJob, LeaseResult
from flows.progress import Progress
from grpo_core.evaluation import Evaluation

MAX_LEASES = 256
Wish = Literal["run", "cancel", "suspend"]


class Stopped(Exception):
    """The run was asked to stop; it can be continued. `wish` says how it was asked."""

    def __init__(self, wish: Wish, step: int) -> None:
        super().__init__(f"stopped at step {step}; the same command continues the run")
        self.wish = wish


Result = TypeVar("Result", covariant=True)


class Dispatched(Protocol[Result]):
    """Work that was started."""

    def done(self) -> bool: ...
    def result(self) -> Result: ...


class Control(Protocol):
    """What the supervisor needs from its surroundings."""

    def wish(self) -> Wish:
        """Whether to go on."""

    def dispatch(self, job: LeaseJob) -> Dispatched[LeaseResult]:
        """Start a generation task."""

    def evaluate(self, job: EvaluationJob) -> Dispatched[Evaluation]:
        """Start an evaluation."""

    def watch(self, name: str, poll: Callable[[], int | None]) -> None:
        """A child process was started; `poll` gives its exit status once it has ended."""

    def show(self, progress: Progress) -> None:
        """Show where the run is; cheap to call often."""

    def say(self, message: str) -> None:
        """Something worth a line in the log."""

    def warn(self, message: str) -> None:
        """Something a person should look at, though the run goes on."""


class Signals:
    """SIGINT and SIGTERM as a wish, while this context lasts. `number` is the signal that came, or 0."""

    def __init__(self) -> None:
        self.number = 0
        self._previous: dict[int, object] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number

    def __enter__(self) -> "Signals":
        # Signal handlers belong to the main thread; elsewhere whoever runs us delivers cancellation in its own way.
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


class LocalControl:
    """No server: threads for the leases, signals for the wish, `show` and `say` for people."""

    def __init__(self, signals: Signals, *, show: Callable[[Progress], None], say: Callable[[str], None]) -> None:
        self._signals = signals
        self._threads = ThreadPoolExecutor(max_workers=MAX_LEASES, thread_name_prefix="lease")
        self._show = show
        self._say = say

    def wish(self) -> Wish:
        return "cancel" if self._signals.number else "run"

    def dispatch(self, job: LeaseJob) -> Future[LeaseResult]:
        return self._threads.submit(job.run)

    def evaluate(self, job: EvaluationJob) -> Future[Evaluation]:
        return self._threads.submit(job.run)

    def watch(self, name: str, poll: Callable[[], int | None]) -> None:
        return None

    def show(self, progress: Progress) -> None:
        self._show(progress)

    def say(self, message: str) -> None:
        self._say(message)

    def warn(self, message: str) -> None:
        self._say(f"warning: {message}")
