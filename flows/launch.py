"""A run started from a terminal: with a Prefect server, one of our own if need be, or without any.

Contract: Ctrl-C and SIGTERM end the run in good order, with the exit status that shells expect of them; whatever was
started for the run ends with it.
"""

import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from flows.assembly import Summary, log_directory, run_to_end
from flows.control import LocalControl, Signals, Stopped
from flows.live import LiveView
from flows.policy import PolicyPreparation
from flows.probe import responds
from flows.run import open_store
from flows.server import DEFAULT_URL, LocalServer
from grpo_core.config import RunConfig

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State


def train_locally(config: RunConfig, take_over: bool) -> Summary:
    """The supervisor without a server."""
    with Signals() as signals, LiveView() as view:
        control = LocalControl(signals, show=view.show, say=view.say)
        try:
            return run_to_end(config, control, take_over=take_over)
        except Stopped as stopped:
            raise exit_stopped(stopped, signals.number) from stopped


def train_with_prefect(config: RunConfig, take_over: bool) -> Summary:
    """The flow, on the configured server or on one of our own."""
    with Signals() as signals:
        try:
            with prefect_server(config, signals) as url:
                print(f"Prefect: {url}", file=sys.stderr)
                state = run_flow(config, take_over, signals)
        except Stopped as stopped:
            raise exit_stopped(stopped, signals.number) from stopped
    if state.is_cancelled():
        print(f"forebay: {state.message}", file=sys.stderr)
        raise typer.Exit(128 + (signals.number or signal.SIGINT))
    summary: Summary = state.result()
    return summary


def run_flow(config: RunConfig, take_over: bool, signals: Signals) -> "State[Any]":
    """The state in which the flow ended. Raise Stopped when a signal came before it began."""
    # Imported late: they read the settings that name the server.
    from prefect.events.worker import EventsWorker
    from prefect.exceptions import Pause, TerminationSignal
    from prefect.logging.handlers import APILogWorker

    from flows.train import COMMAND
    from flows.train import train as flow

    token = COMMAND.set(signals)
    try:
        return flow(config, take_over, return_state=True)
    except TerminationSignal:
        # While Prefect begins and ends a flow, SIGTERM is in its hands; it hands the signal on to ours.
        raise Stopped("cancel", 0) from None
    except Pause:
        print("forebay: suspended; the same command continues the run", file=sys.stderr)
        raise typer.Exit(0) from None
    finally:
        COMMAND.reset(token)
        # What is still to be told must be told before the server goes; at exit it would be tried for a minute.
        APILogWorker.drain_all(timeout=5)
        EventsWorker.drain_all(timeout=5)


@contextmanager
def prefect_server(config: RunConfig, signals: Signals) -> Generator[str, None, None]:
    """The configured server, or a local one that starts while version 0 is already being prepared. Raise Stopped."""
    configured = os.environ.get("PREFECT_API_URL")
    if configured is None and responds(f"{DEFAULT_URL}/api/health"):
        # A second server would share the first one's database, which SQLite cannot serve to both.
        configured = os.environ["PREFECT_API_URL"] = f"{DEFAULT_URL}/api"
    if configured:
        yield configured.removesuffix("/api")
        return
    logs = log_directory(config, open_store(config))
    with LocalServer(logs / "prefect-server.log") as server:
        control = LocalControl(signals, show=lambda progress: None, say=lambda message: print(message, file=sys.stderr))
        with PolicyPreparation(config, logs, control):
            server.wait(control.wish)
            os.environ["PREFECT_API_URL"] = f"{server.url}/api"
            yield server.url


def exit_stopped(stopped: Stopped, number: int) -> typer.Exit:
    """Exit status of a run that was asked to stop: 128 plus the signal."""
    print(f"forebay: {stopped}", file=sys.stderr)
    return typer.Exit(128 + (number or signal.SIGTERM))
