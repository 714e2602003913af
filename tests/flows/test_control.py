"""Wishes reach the run from wherever they come, and faults of our own are not taken for an absent server."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import httpx
import pytest

from flows import train as module
from flows.control import Signals, Stopped
from flows.live import LiveView
from flows.server import LocalServer
from flows.supervise import Command
from flows.train import COMMAND, PrefectControl, flow_signals
from grpo_core.config import RunConfig


def test_waiting_for_the_server_ends_when_it_is_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "server.log"
    with monkeypatch.context() as patch:
        patch.setattr("flows.server.Command", lambda *_, **__: Command("server", ["sleep", "300"], os.environ, log))
        server = LocalServer(log)
    with server, pytest.raises(Stopped, match="the same command continues") as stopped:
        server.wait(lambda: "cancel")
    assert stopped.value.wish == "cancel"


@contextmanager
def command() -> Iterator[Signals]:
    """The signals of a command that calls the flow."""
    with Signals() as signals:
        token = COMMAND.set(signals)
        try:
            yield signals
        finally:
            COMMAND.reset(token)


def test_a_signal_that_came_before_the_flow_counts_in_it() -> None:
    with command() as outside:
        os.kill(os.getpid(), signal.SIGTERM)
        with flow_signals() as inside:
            assert inside.number == outside.number == signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_knows_the_signal_that_ended_the_flow(number: signal.Signals) -> None:
    with command() as outside:
        with flow_signals():
            os.kill(os.getpid(), number)
        assert outside.number == number


def test_a_flow_that_no_command_called_has_signals_of_its_own() -> None:
    with flow_signals() as inside:
        os.kill(os.getpid(), signal.SIGTERM)
        assert inside.number == signal.SIGTERM


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """A control of a server that raises the error in the list for every question."""
    errors: list[Exception] = []

    def read_flow_run(flow_run: object) -> Any:
        raise errors[0]

    @contextmanager
    def get_client(**_: Any) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(read_flow_run=read_flow_run)

    monkeypatch.setattr(module, "get_client", get_client)
    monkeypatch.setattr(module, "runtime", SimpleNamespace(flow_run=SimpleNamespace(id=str(uuid4()))))
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)
    return errors


def test_a_fault_of_our_own_in_the_talk_with_the_server_ends_the_run(ask: list[Exception]) -> None:
    ask.append(ValueError("ours"))
    with PrefectControl(RunConfig(), Signals(), LiveView(), getLogger("test")) as control:
        deadline = time.monotonic() + 20
        with pytest.raises(ValueError, match="ours"):
            while control.wish() == "run":
                assert time.monotonic() < deadline, "the fault was not heard of"
                time.sleep(0.01)


def test_a_server_that_is_away_ends_nothing(ask: list[Exception]) -> None:
    ask.append(httpx.ConnectError("refused"))
    with PrefectControl(RunConfig(), Signals(), LiveView(), getLogger("test")) as control:
        time.sleep(0.2)
        assert control.wish() == "run" and control._thread.is_alive()
