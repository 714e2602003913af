"""Metrics on their way out of a run: each sink on a thread of its own, behind a queue.

Contract: `publish` never waits and never raises. A sink that fails costs one warning until it works again, one that
hangs costs the points that its queue cannot hold; training does not notice either. What is known to be impossible, a
package that is not installed, is refused before a run starts.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import TracebackType
from typing import Protocol

from flows.run import RunRefused
from flows.sinks.parquet import ParquetSink
from flows.sinks.prometheus import PrometheusPage
from flows.sinks.trackers import MlflowRun, TensorBoardFiles, TrackioRun, WandbRun
from grpo_core.config import (
    MetricSink,
    MlflowSink,
    PrometheusSink,
    RunConfig,
    TensorBoardSink,
    TrackioSink,
    WandbSink,
)
from storage.metrics import Point
from storage.objects import ObjectStore

# Points that wait for a sink that is slow; at one a second it may be away for an hour.
QUEUED_POINTS = 4096
# All sinks together may take this long to write what they have when a run ends.
CLOSE_SECONDS = 5.0


class Sink(Protocol):
    """Somewhere metrics go. Used from one thread."""

    def write(self, point: Point) -> None:
        """Take a point; may block, and may raise anything."""

    def close(self) -> None:
        """Write what is left."""


class Publisher:
    """The sinks of a run by name, opened on their own threads. As a context it gives them a few seconds at its end.
    `warn` is called on the thread that publishes."""

    def __init__(self, sinks: Mapping[str, Callable[[], Sink]], warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._complaints: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lines = [_Line(name, opening, self._complaints.put) for name, opening in sinks.items()]

    def publish(self, point: Point) -> None:
        """Hand a point to every sink."""
        for line in self._lines:
            line.offer(point)
        self._complain()

    def _complain(self) -> None:
        while not self._complaints.empty():
            self._warn(self._complaints.get())

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for line in self._lines:
            line.offer(None)
        deadline = time.monotonic() + CLOSE_SECONDS
        for line in self._lines:
            line.join(deadline)
        self._complain()


class _Line:
    """The queue of one sink and the thread that empties it."""

    def __init__(self, name: str, opening: Callable[[], Sink], complain: Callable[[str], None]) -> None:
        self._name = name
        self._open = opening
        self._complain = complain
        self._queue: queue.Queue[Point | None] = queue.Queue(QUEUED_POINTS)
        self._sink: Sink | None = None
        self._failing = self._full = False
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def offer(self, point: Point | None) -> None:
        try:
            self._queue.put_nowait(point)
            self._full = False
        except queue.Full:
            if not self._full:
                self._complain(f"the metrics sink {self._name} does not keep up; it misses steps until it does")
            self._full = True

    def join(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._complain(f"the metrics sink {self._name} did not end in time; what it had not written is lost to it")

    def _run(self) -> None:
        while (point := self._queue.get()) is not None:
            self._try(point)
        if self._sink is not None:
            self._try(None)

    def _try(self, point: Point | None) -> None:
        try:
            if self._sink is None:
                self._sink = self._open()
            if point is None:
                self._sink.close()
            else:
                self._sink.write(point)
            self._failing = False
        except Exception as error:  # noqa: BLE001 - whatever somebody's library raises, it costs a warning and no more
            if not self._failing:
                reason = f"{type(error).__name__}: {error}"
                self._complain(f"the metrics sink {self._name} failed, and is tried again with every step: {reason}")
            self._failing = True


def check_sinks(config: RunConfig) -> None:
    """Raise RunRefused when the package of a sink is not installed."""
    for sink in config.logging.sinks:
        if sink.kind != "prometheus" and find_spec(sink.kind) is None:
            raise RunRefused(
                f"logging.sinks names {sink.kind}, whose package is not installed; run pip install 'forebay[{sink.kind}]' or remove it"
            )


def publisher_of(config: RunConfig, store: ObjectStore, warn: Callable[[str], None]) -> Publisher:
    """The store's own sink and those that the recipe names."""
    openings: dict[str, Callable[[], Sink]] = {
        "store": lambda: ParquetSink(store, every_steps=config.refit.every_steps)
    }
    for number, sink in enumerate(config.logging.sinks):
        openings[f"logging.sinks.{number} ({sink.kind})"] = _opening(sink, config.run_id)
    return Publisher(openings, warn)


def _opening(sink: MetricSink, run_id: str) -> Callable[[], Sink]:
    match sink:
        case PrometheusSink():
            return lambda: PrometheusPage(sink.host, sink.port, run_id)
        case TensorBoardSink():
            return lambda: TensorBoardFiles(sink.directory / run_id)
        case MlflowSink():
            return lambda: MlflowRun(sink.experiment, run_id)
        case WandbSink():
            return lambda: WandbRun(sink.project, run_id)
        case TrackioSink():
            return lambda: TrackioRun(sink.project, run_id)
