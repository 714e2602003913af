"""The command `forebay`. Every failure is one sentence on standard error and a non-zero exit status."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from rich.console import Console

from flows.assembly import Summary, log_directory, run_to_end, summarise
from flows.control import LocalControl, Signals, Stopped
from flows.dispatch import RunFailed
from flows.doctor import examine
from flows.engines import PoolFailed, pool_wish, responds
from flows.live import LiveView
from flows.policy import PolicyFailed, PolicyPreparation
from flows.run import RunRefused, finished_run, open_store
from flows.server import DEFAULT_URL, DeployError, LocalServer, ServerFailed
from flows.supervise import Child, ChildFailed, Command
from flows.views.history import json_lines, ledger_lines, render_ledger
from flows.views.standing import recorded_run
from flows.views.status import render_status
from flows.views.status import status as read_status
from flows.views.trace import trace as read_trace
from flows.views.trace_view import render_trace
from grpo_core import recipe
from grpo_core.config import RunConfig, StorageConfig
from grpo_core.prompts import DataError
from grpo_core.recipe import ConfigError
from grpo_core.rollout.chat import Chat, ChatError
from grpo_core.rollout.group import RolloutFailed
from grpo_core.rollout.rewards import RewardError
from storage import layout
from storage.checkpoints import committed
from storage.errors import StorageError
from storage.objects import ObjectStore
from storage.pool import write_pool_wish

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

QUICKSTART = Path("deployments/recipes/quickstart.yaml")
EXPORT_SECONDS = 3600.0

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Asynchronous GRPO as a Prefect pipeline.",
)
console = Console()

# What a person can do something about. Anything else is a fault of ours and keeps its traceback.
EXPLAINED = (
    ConfigError, DataError, ChatError, RunRefused, RunFailed, PoolFailed, PolicyFailed, ServerFailed, DeployError, ChildFailed, RolloutFailed,
    RewardError, StorageError,
)  # fmt: skip

Recipe = Annotated[Path, typer.Argument(help="A YAML recipe, such as deployments/recipes/quickstart.yaml")]
Root = Annotated[str | None, typer.Option("--root", help="Where runs are kept: a directory or any fsspec URL")]
StorageOptions = Annotated[
    str | None,
    typer.Option(
        "--storage-options", metavar="JSON", help="Options of the fsspec file system of --root, as in storage.options"
    ),
]
RunId = Annotated[str, typer.Argument(metavar="RUN", help="The run's name")]
Urls = Annotated[list[str] | None, typer.Option(metavar="URL", help="An engine; may be given several times")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs")]
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
        store = open_store(config)
        page = write_report(store, config.run_id, None)
        print(summary.text())
        print(f"report: {page}")


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


@app.command()
def validate(recipe_path: Recipe, overrides: Overrides = None) -> None:
    """Check a recipe completely, without torch, GPU or network, and print it with every default."""
    with explained():
        config = read_recipe(recipe_path, overrides)
        print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True), end="")


@app.command()
def status(run_id: RunId, root: Root = None, storage_options: StorageOptions = None, as_json: AsJson = False) -> None:
    """Where a run is."""
    with explained():
        values = read_status(existing(run_id, root, storage_options))
        print(json.dumps(values)) if as_json else console.print(render_status(values))


@app.command()
def ledger(
    run_id: RunId,
    root: Root = None,
    storage_options: StorageOptions = None,
    as_json: AsJson = False,
    all_attempts: Annotated[bool, typer.Option("--all-attempts", help="Also what dead branches decided")] = False,
) -> None:
    """Where every prompt of a run is: one line for each ordinal of the surviving history."""
    with explained():
        lines = ledger_lines(existing(run_id, root, storage_options), all_attempts)
        if as_json:
            for line in json_lines(lines):
                print(line)
        else:
            console.print(render_ledger(lines))


@app.command()
def trace(
    run_id: RunId,
    ordinal: Annotated[int, typer.Argument(min=0)],
    root: Root = None,
    storage_options: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """The life of one prompt: every lease, turn, reward, admission and step, token by token."""
    with explained():
        store = existing(run_id, root, storage_options)
        found = read_trace(store, ordinal, chat_of(store))
        print(json.dumps(found)) if as_json else console.print(render_trace(found))


@app.command()
def report(
    run_id: RunId,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The HTML file; default: beside the run")
    ] = None,
    root: Root = None,
    storage_options: StorageOptions = None,
) -> None:
    """One self-contained HTML page: curves, throughput, lag, waste, sample rollouts."""
    with explained():
        store = existing(run_id, root, storage_options)
        print(write_report(store, run_id, output))


@app.command()
def export(
    run_id: RunId,
    output: Annotated[Path, typer.Option("-o", "--output", help="Directory to write")],
    step: Annotated[int | None, typer.Option("--step", help="A checkpoint's step; default: the newest")] = None,
    root: Root = None,
    storage_options: StorageOptions = None,
) -> None:
    """A checkpoint as a Hugging Face directory, loadable by transformers and servable by vLLM."""
    with explained():
        store = existing(run_id, root, storage_options)
        recorded = recorded_run(store)
        names = [name for name in committed(store) if step is None or name.step == step]
        if not names:
            steps = ", ".join(str(name.step) for name in committed(store)) or "none"
            raise RunRefused(
                f"run {run_id} has no checkpoint{'' if step is None else f' of step {step}'}; there are: {steps}"
            )
        options = parse_storage_options(storage_options) or recorded.config.storage.options
        arguments = ["--root", store.url, "--storage-options", json.dumps(options)]
        arguments += ["--storage-client", recorded.config.storage.client]
        arguments += ["--attempt", str(names[-1].attempt), "--step", str(names[-1].step)]
        arguments += ["--policy", str(policy_of(store, recorded.config)), "-o", str(output)]
        log = log_directory(recorded.config, store) / "export.log"
        python = str(recorded.config.training.python or sys.executable)
        command = Command(
            "export", [python, "-W", "ignore", "-m", "grpo_core.training.export", *arguments], os.environ, log
        )
        with Child(command) as child:
            try:
                status = child.wait(EXPORT_SECONDS)
            except subprocess.TimeoutExpired as error:
                raise ChildFailed(
                    f"the export did not end within {EXPORT_SECONDS:g} s; its last lines, of {log}, are:\n{child.tail()}"
                ) from error
            if status != 0:
                raise child.failure()
        print(output)


@app.command()
def pool(
    run_id: RunId, add: Urls = None, remove: Urls = None, root: Root = None, storage_options: StorageOptions = None
) -> None:
    """Let running engines into the pool of a run, or out of it, while it goes on; prints the number of the wish."""
    with explained():
        print(write_pool_wish(existing(run_id, root, storage_options), pool_wish(add or (), remove or ())))


@app.command()
def doctor(
    recipe_path: Annotated[Path, typer.Argument(help="The recipe to check this machine for")] = QUICKSTART,
    overrides: Overrides = None,
    no_engine: Annotated[
        bool, typer.Option("--no-engine", help="Leave out the start of an engine, about a minute")
    ] = False,
) -> None:
    """Check the installation: packages, store, ports, GPU and the start of an engine."""
    with explained():
        config = read_recipe(recipe_path, overrides)
        findings = []
        for finding in examine(config, start_engine=not no_engine):
            findings.append(finding)
            mark = {True: "ok", False: "FAIL", None: "–"}[finding.ok]
            print(f"{mark:>4}  {finding.question}: {finding.answer}", flush=True)
        if any(finding.ok is False for finding in findings):
            raise typer.Exit(1)


@app.command()
def deploy(server: Annotated[str | None, typer.Option("--server", help="URL of a Prefect server")] = None) -> None:
    """Register the deployments of deployments/prefect.yaml on a Prefect server."""
    with explained():
        # Imported late: it reads the settings that name the server.
        from flows.deploy import deploy as register

        for line in register(server):
            print(line)


def existing(run_id: str, root: str | None, storage_options: str | None = None) -> ObjectStore:
    """The store of a run that is there already, opened for reading."""
    base = root or StorageConfig().root
    options = parse_storage_options(storage_options)
    store = ObjectStore.open(layout.run_root(base, run_id), options, read_only=True)
    if not store.exists(layout.run()):
        raise RunRefused(f"there is no run {run_id} in {base}; give --root, or look at the name")
    return store


def parse_storage_options(text: str | None) -> dict[str, Any]:
    """The value of --storage-options. Raise ConfigError."""
    try:
        options = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"--storage-options {text!r} is not JSON: {error}") from error
    if not isinstance(options, dict):
        raise ConfigError(f"--storage-options {text!r} is not a JSON object; give for example '{{\"anon\": true}}'")
    return options


def policy_of(store: ObjectStore, config: RunConfig) -> Path:
    """The directory of version 0, found in the cache or made again."""
    with Signals() as signals:
        control = LocalControl(signals, show=lambda progress: None, say=lambda message: print(message, file=sys.stderr))
        with PolicyPreparation(config, log_directory(config, store), control) as policy:
            return policy.skeleton()


def chat_of(store: ObjectStore) -> Chat:
    """The tokenizer of a run."""
    config = recorded_run(store).config
    return Chat(policy_of(store, config), config.generation.chat_template_kwargs)


def write_report(store: ObjectStore, run_id: str, output: Path | None) -> Path:
    """Write the report of a run to `output`, by default beside the run, or into the working directory."""
    # Imported late: drawing curves loads a library that no other verb needs.
    from flows.views.report import report as write

    return write(store, output or store.local_path("report.html") or Path(f"{run_id}-report.html"))


if __name__ == "__main__":
    app()
