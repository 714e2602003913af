"""Open leases: what a failed or expired one costs, and when failures end the run."""

import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows.dispatch import Dispatcher
from flows.generate import LeaseJob, LeaseResult
from flows.leasing import Leasing
from grpo_core.config import RunConfig
from grpo_core.prompts import PromptStream, Row
from grpo_core.rollout.concurrency import CallsHang
from grpo_core.rollout.pool import NoEngine
from grpo_core.schedule.tolerance import TooManyFailures
from grpo_core.schedule.window import Window
from storage.leases import read_lease
from storage.objects import ObjectStore
from storage.pool import RefitRecord, write_refit
from storage.trajectories import TrajectoryStore

WINDOW = Window(prompts_per_step=4, max_age=0, every_steps=1, steps=5)
PROMPTS = PromptStream([Row([], {})], seed=0)


class Control:
    """Keeps the dispatched jobs; the test decides how each ends."""

    def __init__(self) -> None:
        self.jobs: list[tuple[LeaseJob, Future[LeaseResult]]] = []
        self.warnings: list[str] = []

    def dispatch(self, job: LeaseJob) -> Future[LeaseResult]:
        self.jobs.append((job, Future()))
        return self.jobs[-1][1]

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def end(self, number: int, *, failed: int = 0) -> None:
        job, future = self.jobs[number]
        ordinals = job.record.ordinals
        failures = {"reward function raised": failed} if failed else {}
        future.set_result(LeaseResult(job.record.lease, ordinals, 1, 0, 0.0, failures))


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    store = ObjectStore.open(str(tmp_path / "run"))
    write_refit(store, RefitRecord(1, 0, 0, ("engine-0",), {}, {}))
    return store


def make(store: ObjectStore, **settings: object) -> tuple[Dispatcher, Control]:
    config = RunConfig.model_validate(
        {
            "generation": {"lease_prompts": 2, **settings},
            "grpo": {"async_grpo": {"max_generation_failures": 1}},
            "rewards": {"timeout_seconds": 0.001},
        }
    )
    leasing = Leasing(store, 1, WINDOW, PROMPTS, None, keep_buffered=True)
    leasing.observe()
    control = Control()
    dispatcher = Dispatcher(
        leasing=leasing,
        trajectories=TrajectoryStore(store, 1),
        generator=SimpleNamespace(config=config),  # type: ignore[arg-type]
        stream=None,  # type: ignore[arg-type]
        control=control,  # type: ignore[arg-type]
        on_tokens=lambda count: None,
        stop=threading.Event(),
    )
    dispatcher.dispatch()
    return dispatcher, control


def test_a_failed_lease_is_sealed_and_its_ordinals_are_leased_again_with_their_failures(store: ObjectStore) -> None:
    dispatcher, control = make(store)
    assert [job.record.ordinals for job, _ in control.jobs] == [(0, 1), (2, 3)]
    control.jobs[0][1].set_exception(MemoryError("no room"))
    dispatcher.collect()
    dispatcher.dispatch()
    assert control.jobs[-1][0].record.ordinals == (0, 1)
    assert read_lease(store, 1, 2).failure_counts == {0: 1, 1: 1}
    assert "no room" in control.warnings[0]


def test_an_expired_lease_tells_its_task_and_leaves_the_others_alone(store: ObjectStore) -> None:
    dispatcher, control = make(
        store, lease_timeout_seconds=0.01, request_timeout_seconds=0.001, tool_timeout_seconds=0.001
    )
    dispatcher.open[1] = SimpleNamespace(**{**_fields(dispatcher.open[1]), "deadline": float("inf")})
    threading.Event().wait(0.05)
    dispatcher.collect()
    assert control.jobs[0][0].stopped() and not control.jobs[1][0].stopped()
    assert list(dispatcher.open) == [1]


def test_failures_beside_a_good_group_are_not_in_a_row(store: ObjectStore) -> None:
    dispatcher, control = make(store)
    control.end(0, failed=1)
    control.end(1, failed=1)
    dispatcher.collect()
    assert not dispatcher.open


def test_failures_in_a_row_end_the_run_with_their_cause(store: ObjectStore) -> None:
    dispatcher, control = make(store)
    control.end(0, failed=2)
    with pytest.raises(TooManyFailures, match="2 groups failed in a row.*reward function raised"):
        dispatcher.collect()


def test_a_stopped_attempt_seals_nothing(store: ObjectStore) -> None:
    dispatcher, control = make(store)
    dispatcher.stop.set()
    control.jobs[0][1].set_exception(RuntimeError("stopped"))
    dispatcher.collect()
    assert control.warnings == [] and dispatcher.trajectories.open_parts([0]) == []


def _fields(lease: object) -> dict[str, object]:
    return {name: getattr(lease, name) for name in ("job", "future", "expired", "deadline")}


@pytest.mark.parametrize(
    "cause", [NoEngine("no engine of the pool carried the newest version"), CallsHang("64 calls of tools")]
)
def test_what_fails_whole_leases_is_not_held_against_the_prompts(store: ObjectStore, cause: Exception) -> None:
    dispatcher, control = make(store)
    control.jobs[0][1].set_exception(cause)
    dispatcher.collect()
    dispatcher.dispatch()
    again = read_lease(store, 1, 2)
    assert again.ordinals == (0, 1) and again.failure_counts == {}


def test_an_outage_that_goes_on_ends_the_run(store: ObjectStore) -> None:
    dispatcher, control = make(store)
    for _, future in control.jobs:
        future.set_exception(NoEngine("no engine of the pool carried the newest version"))
    with pytest.raises(TooManyFailures, match="first cause was: lease 0 failed .NoEngine: no engine of the pool"):
        dispatcher.collect()
