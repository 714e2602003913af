"""The train deployment on a real server and a real worker: its page, its end, and every way of stopping it.

The pipeline, the trainer and the store are the real ones; the engine is the model engine of the scenarios.
"""

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import FlowRun, State, StateType, TaskRun
from prefect.client.schemas.sorting import LogSort
from prefect.states import Cancelling, Suspended

from storage import layout
from storage.attempts import newest
from tests import model_engine
from tests.flows.conftest import Server
from tests.scenarios.run_driver import MARK, REPOSITORY, RunDriver, newest_step

pytestmark = pytest.mark.prefect
WAIT_SECONDS = 240.0
# A person who asks a run to stop is promised fifteen seconds on a machine that is not overloaded; this one may be.
STOP_SECONDS = 90.0
SLOW = {"seconds_per_token": 0.05}


class Flows:
    """Flow runs of the deployment, of runs that live below one directory and share one policy."""

    def __init__(self, client: SyncPrefectClient, deployment: str, directory: Path, cache: Path, worker: Path) -> None:
        self._client = client
        self._deployment = client.read_deployment_by_name(deployment).id
        self._directory = directory
        self._cache = cache
        self._worker = worker
        self.drivers: list[RunDriver] = []

    def driver(self, run_id: str, *, steps: int = 6, faults: dict[str, Any] | None = None) -> RunDriver:
        """A run, not started yet."""
        settings = {
            "run_id": run_id,
            "grpo": {"max_num_steps": steps},
            "logging": {"artifact_seconds": 1.0},
        }
        driver = RunDriver(self._directory / run_id, self._cache, settings)
        driver.faults.write_text(json.dumps(faults or {}))
        self.drivers.append(driver)
        return driver

    def create(self, driver: RunDriver) -> UUID:
        """Ask for a flow run, as the form does."""
        environment = {
            MARK: str(driver.directory),
            model_engine.FAULTS: str(driver.faults),
            "PYTHONPATH": str(REPOSITORY / "tests" / "scenarios"),
            "OMP_NUM_THREADS": "1",
        }
        return self._client.create_flow_run_from_deployment(
            self._deployment, parameters={"config": driver.recipe}, job_variables={"env": environment}
        ).id

    def read(self, flow_run: UUID) -> FlowRun:
        return self._client.read_flow_run(flow_run)

    def state(self, flow_run: UUID) -> State:
        state = self.read(flow_run).state
        assert state is not None
        return state

    def ask(self, flow_run: UUID, state: State) -> None:
        """What the buttons of the UI do."""
        self._client.set_flow_run_state(flow_run, state)

    def task_runs(self, flow_run: UUID) -> list[TaskRun]:
        return self._client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run])))

    def artifacts(self, flow_run: UUID) -> dict[str, Any]:
        """By type, the data of every artifact of a flow run; two of one type are an error."""
        wanted = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run]))
        found = [
            artifact for artifact in self._client.read_artifacts(artifact_filter=wanted) if artifact.type != "result"
        ]
        data = {artifact.type: artifact.data for artifact in found}
        assert len(data) == len(found)
        return data

    def newest_log(self, flow_run: UUID) -> str:
        """The last lines of a flow run's log, as the server has them."""
        wanted = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run]))
        return "\n".join(entry.message for entry in self._client.read_logs(wanted, sort=LogSort.TIMESTAMP_DESC))

    def resume(self, flow_run: UUID) -> None:
        self._client.resume_flow_run(flow_run)

    def wait(self, what: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, f"not within {seconds:g} s; the worker says:\n{self._tail()}"
            time.sleep(0.1)

    def wait_for(self, flow_run: UUID, kind: StateType, seconds: float = WAIT_SECONDS) -> State:
        """Wait for a state; another final one is a failure at once."""

        def reached() -> bool:
            state = self.state(flow_run)
            assert state.type == kind or not state.is_final(), f"{state.name}: {state.message}\n{self._tail()}"
            return state.type == kind

        self.wait(reached, seconds)
        return self.state(flow_run)

    def _tail(self) -> str:
        return self._worker.read_text(errors="replace")[-4000:]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the policy is made once."""
    return tmp_path_factory.mktemp("policies")


@pytest.fixture
def flows(client: SyncPrefectClient, deployment: str, worker: Path, tmp_path: Path, cache: Path) -> Iterator[Flows]:
    flows = Flows(client, deployment, tmp_path, cache, worker)
    yield flows
    for driver in flows.drivers:
        driver.clean_up()


def step_of(driver: RunDriver) -> int:
    footer = newest_step(driver.store) if newest(driver.store) is not None else None
    return 0 if footer is None else footer.name.step


def leases_of(driver: RunDriver) -> set[str]:
    """The names that the leases of a run have in the timeline."""
    prefix = layout.leases_prefix(1)
    names = (layout.parse_lease(key) for key in driver.store.list(prefix, recursive=True))
    return {f"lease-{name.lease:06d}" for name in names if name is not None}


def owners(driver: RunDriver) -> int:
    """How many flow processes of this run live."""
    commands = [" ".join(process.cmdline()) for process in driver.processes()]
    return sum("prefect" in command and "engine" in command for command in commands)


def test_a_run_ends_with_its_timeline_and_its_artifacts(flows: Flows):
    driver = flows.driver("whole")
    flow_run = flows.create(driver)
    flows.wait_for(flow_run, StateType.COMPLETED)
    assert flows.read(flow_run).name == "whole"
    expected = leases_of(driver) | {"prepare-policy", "engine-0", "trainer-1"}
    flows.wait(lambda: {task.name for task in flows.task_runs(flow_run)} == expected)
    flows.wait(lambda: all(task.state and task.state.is_completed() for task in flows.task_runs(flow_run)))
    artifacts = flows.artifacts(flow_run)
    assert artifacts["progress"] == 100.0
    rows = json.loads(artifacts["table"])
    assert [row["step"] for row in rows] == ["6", "5", "4", "3", "2", "1"]
    assert not driver.orphans()


def test_a_second_flow_of_a_living_run_ends_at_once_and_the_first_goes_on_until_it_is_cancelled(flows: Flows):
    driver = flows.driver("owned", steps=10_000, faults=SLOW)
    first = flows.create(driver)
    flows.wait(lambda: step_of(driver) >= 1)
    attempt = newest(driver.store)

    second = flows.create(driver)
    refused = flows.wait_for(second, StateType.FAILED)
    assert "belongs to process" in refused.message and "--take-over" in refused.message
    reached = step_of(driver)
    flows.wait(lambda: step_of(driver) > reached)
    assert newest(driver.store) == attempt

    flows.ask(first, Cancelling())
    stopped = flows.wait_for(first, StateType.CANCELLED, STOP_SECONDS)
    assert "the same command continues the run" in stopped.message
    assert not driver.orphans()
    flows.wait(lambda: all(task.state and task.state.is_final() for task in flows.task_runs(first)))
    assert not any(task.state and task.state.is_failed() for task in flows.task_runs(first))


def test_an_absent_server_stops_nothing_and_hears_of_a_cancellation_afterwards(flows: Flows, server: Server):
    driver = flows.driver("alone", steps=10_000, faults=SLOW)
    flow_run = flows.create(driver)
    flows.wait(lambda: step_of(driver) >= 1)
    server.signal(signal.SIGSTOP)
    try:
        reached = step_of(driver)
        time.sleep(20)
        assert step_of(driver) > reached
    finally:
        server.signal(signal.SIGCONT)
    flows.wait(lambda: "answers again" in flows.newest_log(flow_run))
    flows.ask(flow_run, Cancelling())
    flows.wait_for(flow_run, StateType.CANCELLED, STOP_SECONDS)
    assert not driver.orphans()


def test_a_suspended_run_is_resumed_by_exactly_one_flow_process(flows: Flows):
    driver = flows.driver("paused", steps=12, faults=SLOW)
    flow_run = flows.create(driver)
    flows.wait(lambda: step_of(driver) >= 1)
    assert owners(driver) == 1
    flows.ask(flow_run, Suspended(timeout_seconds=600))
    flows.wait(lambda: not driver.processes(), STOP_SECONDS)
    assert flows.state(flow_run).name == "Suspended"
    reached, attempt = step_of(driver), newest(driver.store).attempt

    driver.faults.write_text("{}")
    flows.resume(flow_run)
    flows.wait_for(flow_run, StateType.RUNNING)
    flows.wait(lambda: newest(driver.store).attempt > attempt)
    assert owners(driver) == 1
    flows.wait_for(flow_run, StateType.COMPLETED)
    assert newest(driver.store).attempt == attempt + 1
    assert step_of(driver) == 12 > reached
