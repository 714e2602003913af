"""One real Prefect server and one real worker for the session, in a home directory of their own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.deploy import CHECKOUT, deploy
from flows.probe import responds
from flows.server import HOST, SETTINGS
from grpo_core.ports import free_port

START_SECONDS = 240.0
POOL = "forebay"


@dataclass(frozen=True)
class Server:
    """A running server. Its processes share one session, so that all of them can be stopped and continued."""

    url: str
    process: subprocess.Popen[bytes]

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("prefect")
    port = free_port(HOST)
    url = f"http://{HOST}:{port}"
    with pytest.MonkeyPatch.context() as patch, temporary_settings({PREFECT_API_URL: f"{url}/api"}):
        # For everything that the tests start; this process reads nothing from there.
        patch.setenv("PREFECT_HOME", str(home))
        environment = {**os.environ, **SETTINGS, "PREFECT_UI_API_URL": f"{url}/api"}
        log = home / "server.log"
        with log.open("wb") as output:
            process = start(["server", "start", "--host", HOST, "--port", str(port)], environment, output)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not responds(f"{url}/api/health"):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
                time.sleep(0.2)
            yield Server(url, process)
        finally:
            stop(process)


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


@pytest.fixture(scope="session")
def deployment(server: Server, client: SyncPrefectClient) -> str:
    """The full name of the training deployment, on a pool that may run more than one flow at a time."""
    name, _ = deploy(server.url)
    client.update_work_pool(POOL, WorkPoolUpdate(concurrency_limit=4))
    return name


@pytest.fixture(scope="session")
def worker(server: Server, deployment: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A process worker that asks for work every second; gives its log."""
    log = tmp_path_factory.mktemp("prefect") / "worker.log"
    environment = {
        **os.environ,
        "PREFECT_API_URL": f"{server.url}/api",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PREFECT_LOGGING_SERVER_LEVEL": "WARNING",
    }
    with log.open("wb") as output:
        process = start(["worker", "start", "--pool", POOL], environment, output)
    yield log
    stop(process)


def start(arguments: list[str], environment: dict[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    """A Prefect command in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "prefect", *arguments],
        cwd=CHECKOUT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def stop(process: subprocess.Popen[bytes]) -> None:
    """End such a command and all it started."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait(10)
