"""The Prefect server of a laptop: SQLite, loopback, started when no other is configured and stopped with the run.

Imports no Prefect, so that the command line can name these errors before it knows which server to talk to.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from flows.control import Stopped, Wish
from flows.probe import responds
from flows.supervise import Child, Command
from grpo_core.ports import free_port, port_is_free

HOST = "127.0.0.1"
PORT = 4200
DEFAULT_URL = f"http://{HOST}:{PORT}"
# The first start migrates the database for 20 to 90 seconds.
START_SECONDS = 240.0


class ServerFailed(RuntimeError):
    """The Prefect server did not start; the message shows its last lines."""


class DeployError(RuntimeError):
    """The deployments could not be registered; the message says why and what to do."""


# What a server needs beside multi-day jobs: leases of limits that survive a restart, a bounded queue of events, and
# neither telemetry nor advertisements. deployments/prefect.env says the same for a server that somebody starts by hand.
SETTINGS = {
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    "PREFECT_EVENTS_WORKER_MAX_QUEUE_SIZE": "10000",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "DO_NOT_TRACK": "1",
}


class LocalServer:
    """A server on this machine while the context is open. Starts at once; `wait` before using it."""

    def __init__(self, log: Path) -> None:
        self._port = PORT if port_is_free(HOST, PORT) else free_port(HOST)
        self.url = f"http://{HOST}:{self._port}"
        environment = {
            **os.environ,
            **SETTINGS,
            # Without it the pages would look for the API at the default port.
            "PREFECT_UI_API_URL": f"{self.url}/api",
        }
        arguments = [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(self._port)]
        self._command = Command("prefect-server", arguments, environment, log, grace_seconds=5)

    def wait(self, wish: Callable[[], Wish]) -> None:
        """Wait until the API answers, asking meanwhile whether to go on. Raise ServerFailed, or Stopped."""
        deadline = time.monotonic() + START_SECONDS
        while not responds(f"{self.url}/api/health"):
            if self._child.poll() is not None:
                raise ServerFailed(f"the local Prefect server could not start: {self._child.failure()}")
            if time.monotonic() > deadline:
                raise ServerFailed(
                    f"the local Prefect server did not answer within {START_SECONDS:.0f} s; its last lines are:\n{self._child.tail()}"
                )
            if (wished := wish()) != "run":
                raise Stopped(wished, 0)
            time.sleep(0.2)

    def __enter__(self) -> "LocalServer":
        self._child = Child(self._command)
        return self

    def __exit__(self, *exception: object) -> None:
        self._child.stop()
