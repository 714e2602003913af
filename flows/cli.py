"""The command `forebay`. Every failure is one sentence on standard error and a non-zero exit status."""

import json
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from flows.assembly import Summary, summarise
from flows.collection import collect_garbage, render_collection
from flows.doctor import examine
from flows.engines import PoolFailed
from flows.export import export_checkpoint, policy_of
from flows.launch import train_locally, train_with_prefect
from flows.pipeline import RunFailed
from flows.policy import PolicyFailed
from flows.run import RunRefused, finished_run, open_store
from flows.server import DeployError, ServerFailed
from flows.supervise import ChildFailed
from flows.views.history import json_lines, ledger_lines, render_ledger
from flows.views.plan import measured_rates, render_plan
from flows.views.standing import recorded_run
from flows.views.status import render_status
from flows.views.status import status as read_status
from flows.views.trace import trace as read_trace
from flows.views.trace_view import render_trace
from flows.wishes import WishRefused, pool_wish
from grpo_core import recipe
from grpo_core.config import RunConfig, StorageConfig
from grpo_core.prompts import DataError
from grpo_core.recipe import ConfigError
from grpo_core.rollout.chat import Chat, ChatError
from grpo_core.rollout.rewards import RewardError
from grpo_core.rollout.turns import RolloutFailed
from grpo_core.schedule.plan import plan as plan_run
from grpo_core.schedule.rates import Given, rates_of
from grpo_core.schedule.tolerance import TooManyFailures
from storage import layout
from storage.errors import StorageError
from storage.objects import ObjectStore
from storage.pool import write_pool_wish

QUICKSTART = Path("deployments/recipes/quickstart.yaml")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Asynchronous GRPO as a Prefect pipeline.",
)
console = Console()

# What a person can do something about. Anything else is a fault of ours and keeps its traceback.
EXPLAINED = (
    ConfigError, DataError, ChatError, RunRefused, RunFailed, PoolFailed, WishRefused, PolicyFailed, ServerFailed, DeployError, ChildFailed, RolloutFailed,
    RewardError, StorageError, TooManyFailures,
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
    return None if finished_run(config, store) is None else summarise(config, store)


@app.command()
def validate(recipe_path: Recipe, overrides: Overrides = None) -> None:
    """Check a recipe completely, without torch, GPU or network, and print it with every default."""
    with explained():
        config = read_recipe(recipe_path, overrides)
        print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True), end="")


@app.command()
def plan(
    recipe_path: Recipe,
    overrides: Overrides = None,
    as_json: AsJson = False,
    measured: Annotated[str | None, typer.Option("--from", metavar="RUN", help="Take the speeds from this run")] = None,
    root: Root = None,
    storage_options: StorageOptions = None,
    tokens_per_second: Annotated[
        float | None, typer.Option("--tokens-per-second", min=0.001, help="What one full engine generates")
    ] = None,
    step_seconds: Annotated[
        float | None, typer.Option("--step-seconds", min=0.001, help="What one optimizer step takes")
    ] = None,
    mean_length: Annotated[
        float | None, typer.Option("--mean-length", min=1, help="Mean tokens of a completion")
    ] = None,
    sigma: Annotated[
        float | None, typer.Option("--sigma", min=0, max=4, help="Spread of the logarithm of the lengths; 0: all equal")
    ] = None,
) -> None:
    """How many engines and which window a recipe needs: utilisation, lag and waste to expect, from a simulation."""
    with explained():
        config = read_recipe(recipe_path, overrides)
        given = Given(tokens_per_second, step_seconds, mean_length, sigma)
        found_rates = None if measured is None else measured_rates(existing(measured, root, storage_options))
        found = plan_run(config, rates_of(config, given, found_rates))
        print(json.dumps(found.to_json())) if as_json else console.print(render_plan(found))


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
def gc(
    run_id: RunId,
    root: Root = None,
    storage_options: StorageOptions = None,
    as_json: AsJson = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go")] = False,
) -> None:
    """Delete what retention no longer needs; never anything that a kept checkpoint or a living run relies on."""
    with explained():
        store = existing(run_id, root, storage_options)
        found = collect_garbage(store, now=time.time(), dry_run=dry_run)
        print(json.dumps(found.as_json())) if as_json else console.print(render_collection(found))


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
        export_checkpoint(store, run_id, output, step, parse_storage_options(storage_options))
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
