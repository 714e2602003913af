"""Engines that no run started and that outlive the runs which use them."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flows.probe import responds
from flows.slots import engine_spec
from grpo_core.config import LocalPool
from grpo_core.ports import free_port
from grpo_core.rollout.launch import engine_command
from tests import model_engine
from tests.scenarios.run_driver import RunDriver

START_SECONDS = 400.0
STOP_SECONDS = 15.0


@contextmanager
def running_engine(driver: RunDriver, directory: Path, *, python: Path | None = None) -> Iterator[str]:
    """The URL of an engine for the policy of `driver`: vLLM, or what `python` starts. Its log goes to `directory`."""
    pool = LocalPool(enforce_eager=True, kv_cache_bytes=1 << 26, python=python)
    port = free_port(pool.host)
    command = engine_command(
        engine_spec(driver.config, pool, driver.policy(), 0, port), os.environ, *[str(python)] * bool(python)
    )
    with (directory / "engine.log").open("wb") as log:
        process = subprocess.Popen(
            command.arguments,
            env={**command.environment, model_engine.FAULTS: str(driver.faults)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://{pool.host}:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while not responds(f"{url}/health"):
            assert process.poll() is None and time.monotonic() < deadline, (directory / "engine.log").read_text()
            time.sleep(0.2)
        yield url
    finally:
        os.killpg(process.pid, 9)
        process.wait(STOP_SECONDS)
