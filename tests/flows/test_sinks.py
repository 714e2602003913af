"""Every sink gets every step, and none of them can hurt a run, whatever it does."""

import math
import socket
import sys
import threading
import types
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from flows.run import RunRefused
from flows.sinks import publisher
from flows.sinks.parquet import WRITE_SECONDS, ParquetSink
from flows.sinks.prometheus import PrometheusPage
from flows.sinks.publisher import Publisher, Sink, check_sinks, publisher_of
from flows.sinks.trackers import MlflowRun, TensorBoardFiles, TrackioRun, WandbRun
from grpo_core.recipe import parse
from storage import layout
from storage.attempts import claim_next
from storage.layout import MetricsName
from storage.ledger import LedgerWriter, Totals, ledger_rows
from storage.metrics import Point, read_points
from storage.objects import ObjectStore


def point(step: int, attempt: int = 1, **metrics: float) -> Point:
    return Point(attempt, step, step, 1000.0 + step, {"loss": 0.5, "reward/m:f": 0.25} | metrics)


class Recorder:
    """A sink that fails at the steps of `failing`, and waits in each write until it `may` go on."""

    def __init__(self, failing: tuple[int, ...] = ()) -> None:
        self.failing = failing
        self.steps: list[int] = []
        self.closed = False
        self.may = threading.Event()
        self.may.set()

    def write(self, point: Point) -> None:
        self.may.wait(30)
        if point.step in self.failing:
            raise ConnectionError("the tracker is away")
        self.steps.append(point.step)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore.open(str(tmp_path / "run"), {})


def test_every_sink_gets_every_step_and_is_closed() -> None:
    recorders, warnings = {"a": Recorder(), "b": Recorder()}, list[str]()
    with Publisher({name: (lambda r=recorder: r) for name, recorder in recorders.items()}, warnings.append) as out:
        for step in range(5):
            out.publish(point(step))
    assert [(r.steps, r.closed) for r in recorders.values()] == [([0, 1, 2, 3, 4], True)] * 2
    assert warnings == []


def test_a_failing_sink_costs_one_warning_until_it_works_again() -> None:
    broken, whole, warnings = Recorder(failing=(1, 2, 4)), Recorder(), list[str]()
    with Publisher({"broken": lambda: broken, "whole": lambda: whole}, warnings.append) as out:
        for step in range(6):
            out.publish(point(step))
    assert whole.steps == [0, 1, 2, 3, 4, 5] and broken.steps == [0, 3, 5]
    assert [warning.split(":")[0] for warning in warnings] == [
        "the metrics sink broken failed, and is tried again with every step"
    ] * 2
    assert "ConnectionError: the tracker is away" in warnings[0]


def test_a_sink_that_cannot_be_opened_is_tried_again() -> None:
    answers = iter([OSError("no route"), Recorder()])
    opened: list[Recorder] = []

    def opening() -> Sink:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        opened.append(answer)
        return answer

    warnings: list[str] = []
    with Publisher({"late": opening}, warnings.append) as out:
        out.publish(point(1))
        out.publish(point(2))
    assert opened[0].steps == [2] and len(warnings) == 1


def test_a_hanging_sink_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "QUEUED_POINTS", 3)
    monkeypatch.setattr(publisher, "CLOSE_SECONDS", 0.2)
    hanging, whole, warnings = Recorder(), Recorder(), list[str]()
    hanging.may.clear()
    try:
        with Publisher({"hanging": lambda: hanging}, warnings.append) as out:
            for step in range(10):
                out.publish(point(step))
    finally:
        hanging.may.set()
    assert "does not keep up" in warnings[0] and "did not end in time" in warnings[-1] and len(warnings) == 2
    assert whole.steps == []


def test_warnings_come_on_the_thread_that_publishes() -> None:
    threads: list[threading.Thread] = []
    with Publisher({"a": lambda: Recorder(failing=(0,))}, lambda _: threads.append(threading.current_thread())) as out:
        out.publish(point(0))
    assert threads == [threading.current_thread()]


def test_the_store_has_every_step_at_the_end(store: ObjectStore) -> None:
    with publisher_of(parse({}, where="test"), store, print) as out:
        for step in (99, 100, 101):
            out.publish(point(step))
        out.publish(Point(1, 99, 99, 2000.0, {"evaluation/sampled": 0.75}))
    assert [p.step for p in read_points(store, MetricsName(1, 1))] == [100, 101]
    assert read_points(store, MetricsName(1, 0)) == [point(99), Point(1, 99, 99, 2000.0, {"evaluation/sampled": 0.75})]


def test_the_store_is_written_now_and_then(store: ObjectStore) -> None:
    now = 0.0
    sink = ParquetSink(store, every_steps=1, clock=lambda: now)
    sink.write(point(1))
    now = WRITE_SECONDS + 1
    assert read_points(store, MetricsName(1, 0)) == []
    sink.write(point(2))
    assert [p.step for p in read_points(store, MetricsName(1, 0))] == [1, 2]
    now += WRITE_SECONDS / 2
    sink.write(point(3))
    assert [p.step for p in read_points(store, MetricsName(1, 0))] == [1, 2]


def test_the_next_attempt_completes_the_one_before(store: ObjectStore) -> None:
    claim_next(store, parent=None, host="h", pid=1, pid_started_at=0.0, claimed_at=0.0)
    LedgerWriter(store, 1).write_step(1, ledger_rows([{"ordinal": 0, "state": "trained"}]), Totals(), {"loss": 2.0})
    sink = ParquetSink(store, every_steps=1)
    sink.write(point(1, attempt=2))
    sink.close()
    assert read_points(store, MetricsName(1, 0)) == [Point(1, 1, 1, None, {"loss": 2.0})]
    assert read_points(store, MetricsName(2, 0)) == [point(1, attempt=2)]
    assert store.exists(layout.metrics(MetricsName(2, 0)))


def scraped(page: PrometheusPage) -> dict[tuple[str, str], float]:
    answer = httpx.get(f"http://127.0.0.1:{page.port}/metrics", timeout=10)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, sample.labels.get("member", "")): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.labels["run"] == 'a "run"'
    }


def test_prometheus_reads_the_page() -> None:
    page = PrometheusPage("127.0.0.1", 0, 'a "run"')
    try:
        assert scraped(page) == {}
        page.write(point(7, **{"clip_ratio/low": 0.125, "reward/a\\b": math.nan}))
        page.write(Point(1, 6, 6, 3000.0, {"evaluation/greedy": 0.5}))
        found = scraped(page)
        assert found["forebay_loss", ""] == 0.5 and found["forebay_clip_ratio_low", ""] == 0.125
        assert found["forebay_reward", "m:f"] == 0.25 and math.isnan(found["forebay_reward", "a\\b"])
        assert found["forebay_evaluation", "greedy"] == 0.5 and found["forebay_step", ""] == 7
        page.write(point(8))
        found = scraped(page)
        assert found["forebay_step", ""] == 8 and found["forebay_updated_at_seconds", ""] == 1008
        assert ("forebay_clip_ratio_low", "") not in found and found["forebay_evaluation", "greedy"] == 0.5
        assert httpx.get(f"http://127.0.0.1:{page.port}/else", timeout=10).status_code == 404
    finally:
        page.close()


def test_a_taken_port_is_a_warning(store: ObjectStore) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = parse({"logging": {"sinks": [{"kind": "prometheus", "port": port}]}}, where="test")
        warnings: list[str] = []
        with publisher_of(config, store, warnings.append) as out:
            out.publish(point(1))
    assert len(warnings) == 1 and "logging.sinks.0 (prometheus)" in warnings[0]
    assert [p.step for p in read_points(store, MetricsName(1, 0))] == [1]


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_a_missing_package_is_refused_before_the_run(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse({"logging": {"sinks": [{"kind": kind}]}}, where="test")
    monkeypatch.setattr(publisher, "find_spec", lambda name: None)
    with pytest.raises(RunRefused, match=rf"names {kind}.*pip install 'forebay\[{kind}\]'"):
        check_sinks(config)
    monkeypatch.setattr(publisher, "find_spec", lambda name: types.SimpleNamespace())
    check_sinks(config)


class Calls(types.ModuleType):
    """A package that records every call of it, and of what its calls give."""

    def __init__(self, name: str, calls: list[tuple]) -> None:
        super().__init__(name)
        self._calls = calls

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments, **named):
            self._calls.append((name, *arguments, named))
            return [] if name == "search_runs" else self

        return call


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    made: list[tuple] = []
    for name in ("trackio", "mlflow"):
        monkeypatch.setitem(sys.modules, name, Calls(name, made))
    return made


def test_trackio_continues_the_run_of_that_name(calls: list[tuple]) -> None:
    run = TrackioRun("forebay", "r1")
    run.write(point(3))
    run.close()
    assert calls == [
        ("init", {"project": "forebay", "name": "r1", "resume": "allow"}),
        ("log", {"loss": 0.5, "reward/m:f": 0.25, "attempt": 1, "version": 3}, {"step": 3}),
        ("finish", {}),
    ]


class Wandb(types.ModuleType):
    """As wandb behaves: a call's step is the next one unless it is given, and what comes with a lower one than the
    newest is dropped. A curve is drawn over the metric that was defined for it, else over that step."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: dict[str, list[dict[str, float]]] = {}
        self.axes: dict[str, str] = {}

    def init(self, *, project: str, name: str, id: str, resume: str) -> "Wandb":
        assert (project, name, resume) == ("forebay", id, "allow")
        self.history = self.runs.setdefault(id, [])
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        if step_metric is not None:
            self.axes[name] = step_metric

    def log(self, data: dict[str, float], step: int | None = None) -> None:
        newest = self.history[-1]["_step"] if self.history else -1
        taken = newest + 1 if step is None else step
        if taken >= newest:
            self.history.append({"_step": taken, **data})

    def finish(self) -> None:
        self.history = []

    def curve(self, run_id: str, name: str) -> list[tuple[float, float]]:
        axis = self.axes.get(name, self.axes.get("*", "_step"))
        return [(row[axis], row[name]) for row in self.runs[run_id] if name in row]


def test_wandb_loses_no_point_of_an_earlier_step(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run = WandbRun("forebay", "r1")
    for written in (
        point(1),
        point(2),
        point(3),
        Point(1, 2, 2, 2000.0, {"evaluation/sampled": 0.75}),
        point(4),
    ):
        run.write(written)
    run.close()
    later = WandbRun("forebay", "r1")
    later.write(point(3, attempt=2, loss=0.25))
    later.close()
    assert wandb.curve("r1", "evaluation/sampled") == [(2, 0.75)]
    assert wandb.curve("r1", "loss") == [(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.5), (3, 0.25)]
    assert wandb.curve("r1", "attempt")[-1] == (3, 2)


def test_mlflow_gets_metrics_by_step(calls: list[tuple]) -> None:
    run = MlflowRun("forebay", "r1")
    run.write(point(3))
    run.write(Point(1, 2, 2, 2000.0, {"evaluation/pass@2": 0.75, "reward/{a}": 1.0}))
    run.close()
    assert [call[0] for call in calls] == [
        "set_experiment",
        "search_runs",
        "start_run",
        "log_metrics",
        "log_metrics",
        "end_run",
    ]
    assert calls[2] == ("start_run", {"run_id": None, "run_name": "r1"})
    assert calls[3] == ("log_metrics", {"loss": 0.5, "reward/m:f": 0.25}, {"step": 3})
    assert calls[4] == ("log_metrics", {"evaluation/pass_at_2": 0.75, "reward/_a_": 1.0}, {"step": 2})


def test_tensorboard_reads_its_event_files(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    files = TensorBoardFiles(tmp_path)
    for step in (1, 2):
        files.write(point(step, loss=float(step)))
    files.write(Point(1, 1, 1, 2000.0, {"evaluation/sampled": 0.75}))
    files.close()
    events = accumulator.EventAccumulator(str(tmp_path), size_guidance={"tensors": 0})
    events.Reload()
    assert sorted(events.Tags()["tensors"]) == ["evaluation/sampled", "loss", "reward/m:f"]
    assert [(event.step, event.wall_time) for event in events.Tensors("loss")] == [(1, 1001.0), (2, 1002.0)]
    assert [event.step for event in events.Tensors("evaluation/sampled")] == [1]
