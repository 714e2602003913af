"""The command `forebay`. Every failure is one sentence on standard error and a non-zero exit status."""

import json
import os
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from flows.assembly import Summary, log_directory, run_to_end, summarise
from flows.control import LocalControl, Signals, Stopped
from flows.engines import PoolFailed
from flows.live import LiveView
from flows.pipeline import RunFailed
from flows.policy import PolicyFailed, PolicyPreparation
from flows.run import RunRefused, finished_run, open_store
from flows.server import LocalServer, ServerFailed
from flows.supervise import ChildFailed
from grpo_core import recipe
from grpo_core.config import RunConfig
from grpo_core.prompts import DataError
from grpo_core.recipe import ConfigError
from grpo_core.rollout.chat import ChatError
from grpo_core.rollout.group import RolloutFailed
from grpo_core.rollout.rewards import RewardError
from storage.errors import StorageError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Asynchronous GRPO as a Prefect pipeline.",
)
console = Console()

# What a person can do something about. Anything else is a fault of ours and keeps its traceback.
EXPLAINED = (
    ConfigError, DataError, ChatError, RunRefused, RunFailed, PoolFailed, PolicyFailed, ServerFailed, ChildFailed, RolloutFailed, RewardError, StorageError,
)  # fmt: skip

Recipe = Annotated[Path, typer.Argument(help="A YAML recipe, such as deployments/recipes/quickstart.yaml")]
Root = Annotated[str | None, typer.Option("--root", help="Where runs are kept: a directory or any fsspec URL")]
RunId = Annotated[str, typer.Argument(metavar="RUN", help="The run's name")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key of the recipe, as dotted.key=value"),
]


@contextmanager
def explained() -> Generator[None, None, None]:
    """Turn the errors a person can act on into one sentence and exit status 1."""
    try:
        yield
    except EXPLAINED as error:
        print(f"forebay: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


@app.command()
def train(
    recipe_path: Recipe,
    run_id: Annotated[
        str | None, typer.Option("--run-id", help="The run's name; the same name continues the run")
    ] = None,
    root: Root = None,
    overrides: Overrides = None,
    no_prefect: Annotated[bool, typer.Option("--no-prefect", help="Without a Prefect server")] = False,
    take_over: Annotated[bool, typer.Option("--take-over", help="Fence a flow that seems to own the run")] = False,
) -> None:
    """Run, or continue, a run to its configured end."""
    with explained():
        config = read_recipe(recipe_path, overrides, run_id=run_id, root=root)
        summary = finished_summary(config)
        if summary is None:
            summary = train_locally(config, take_over) if no_prefect else train_with_prefect(config, take_over)
        console.print(summary.text(), highlight=False)


def read_recipe(
    path: Path, overrides: list[str] | None, *, run_id: str | None = None, root: str | None = None
) -> RunConfig:
    """The recipe as the command line asks for it."""
    settings = list(overrides or [])
    settings += [f"run_id={json.dumps(run_id)}"] if run_id else []
    settings += [f"storage.root={json.dumps(root)}"] if root else []
    return recipe.load(path, tuple(settings))


def finished_summary(config: RunConfig) -> Summary | None:
    """The summary of a run that has nothing left to do; such a run starts no process at all."""
    store = open_store(config)
    steps = finished_run(config, store)
    return None if steps is None else summarise(config, store, steps)


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
    with prefect_server(config) as url:
        print(f"Prefect: {url}", file=sys.stderr)
        # Imported late: it reads the settings that name the server.
        from prefect.client.schemas.objects import State
        from prefect.events.worker import EventsWorker
        from prefect.logging.handlers import APILogWorker

        from flows.train import train as flow

        state: State[Any] = flow(config, take_over, return_state=True)
        # What is still to be told must be told before the server goes; at exit it would be tried in vain for a minute.
        APILogWorker.drain_all(timeout=5)
        EventsWorker.drain_all(timeout=5)
    if state.is_cancelled():
        print(f"forebay: {state.message}", file=sys.stderr)
        raise typer.Exit(128 + signal.SIGINT)
    if state.is_paused():
        print(f"forebay: {state.message or 'suspended'}; the same command continues the run", file=sys.stderr)
        raise typer.Exit(0)
    summary: Summary = state.result()
    return summary


@contextmanager
def prefect_server(config: RunConfig) -> Generator[str, None, None]:
    """The configured server, or a local one that starts while version 0 is already being prepared."""
    configured = os.environ.get("PREFECT_API_URL")
    if configured:
        yield configured.removesuffix("/api")
        return
    logs = log_directory(config, open_store(config))
    with Signals() as signals, LocalServer(logs / "prefect-server.log") as server:
        control = LocalControl(signals, show=lambda progress: None, say=lambda message: print(message, file=sys.stderr))
        with PolicyPreparation(config, logs, control):
            server.wait()
            os.environ["PREFECT_API_URL"] = f"{server.url}/api"
            yield server.url


def exit_stopped(stopped: Stopped, number: int) -> typer.Exit:
    """Exit status of a run that was asked to stop: 128 plus the signal."""
    print(f"forebay: {stopped}", file=sys.stderr)
    return typer.Exit(128 + (number or signal.SIGTERM))


@app.command()
def validate(recipe_path: Recipe, overrides: Overrides = None) -> None:
    """Check a recipe completely, without torch, GPU or network, and print it with every default."""
    with explained():
        config = read_recipe(recipe_path, overrides)
        print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True), end="")


def render(action: Callable[[], None]) -> None:
    with explained():
        action()
