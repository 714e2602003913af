"""`forebay plan`: the speeds of a run that was, and a plan for people to read.

Contract: of a run a bounded number of parts and ledger ends are read, all from its middle, where neither the first fill
nor the end distorts them.
"""

from collections import defaultdict
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from flows.run import RunRefused
from flows.views.series import step_points
from flows.views.standing import recorded_run
from flows.views.terminal import figure, plain
from grpo_core.rollout.rows import OK
from grpo_core.schedule.plan import Plan
from grpo_core.schedule.rates import Rates, Served, observed_rates
from storage import layout
from storage.ledger import ledger_names
from storage.objects import ObjectStore
from storage.trajectories import TrajectoryStore

Name = TypeVar("Name")

MOST_PARTS = 64
MOST_STEPS = 200
COLUMNS = ["ordinal", "rollout", "version_spans", "engine", "status", "submitted_at", "finished_at"]


def measured_rates(store: ObjectStore) -> Rates:
    """How fast the engines and the trainer of a run were, in its newest attempt that trained. Raise RunRefused."""
    run = recorded_run(store)
    steps = [name for name in ledger_names(store) if name.drops is None]
    if not steps:
        raise RunRefused(f"run {run.config.run_id} has trained no step yet; give the speeds by hand instead of --from")
    attempt = steps[-1].attempt
    names = _middle([name for name in steps if name.attempt == attempt], MOST_STEPS)
    points = step_points(store, names, every_steps=run.config.refit.every_steps)
    served = _served(store, attempt)
    if not served:
        raise RunRefused(
            f"run {run.config.run_id} keeps no timed rollout of attempt {attempt} any more; give the speeds by hand instead of --from"
        )
    return observed_rates(
        served,
        step_seconds=[point.step_seconds for point in points],
        refit_seconds=[point.refit_seconds for point in points if point.refit is not None],
    )


def _served(store: ObjectStore, attempt: int) -> list[Served]:
    """The requests whose groups are in a block of consecutive parts."""
    found = (layout.parse_part(key) for key in store.list(layout.trajectories_prefix(attempt), recursive=True))
    trajectories = TrajectoryStore(store, attempt)
    served = []
    for part in _middle(sorted(name for name in found if name), MOST_PARTS):
        # Siblings of one request; a group that was leased twice was two requests.
        requests: dict[tuple[int, str, float, float], dict[int, int]] = defaultdict(dict)
        for row in trajectories.read_part(part, COLUMNS)[1].to_pylist():
            start, end = row["submitted_at"], row["finished_at"]
            tokens = sum(span["end"] - span["start"] for span in row["version_spans"])
            if row["status"] == OK and start is not None and end is not None and end > start and tokens:
                rollouts = requests[row["ordinal"], row["engine"], start, end]
                rollouts[row["rollout"]] = rollouts.get(row["rollout"], 0) + tokens
        served += [
            Served(engine, tuple(rollouts.values()), end - start, end)
            for (_, engine, start, end), rollouts in requests.items()
        ]
    return served


def _middle(items: list[Name], count: int) -> list[Name]:
    """Up to `count` consecutive items around the middle."""
    first = max(0, (len(items) - count) // 2)
    return items[first : first + count]


def render_plan(plan: Plan) -> RenderableType:
    """What to expect of the recipe as it is, what else was tried, and the advice."""
    outcome = plan.current.outcome
    facts = Table.grid(padding=(0, 3))
    for style in ("dim", "", "dim", ""):
        facts.add_column(style=style)
    lag = outcome.lag
    for name, value, other, second in (
        ("trainer busy", f"{outcome.trainer:.1%}", "pool busy", f"{outcome.pool:.1%}"),
        ("steps per hour", figure(outcome.steps_per_hour, 1), "efficiency", f"{outcome.efficiency:.1%}"),
        ("lag mean", figure(lag.mean, 2), "p95, max", f"{lag.p95}, {lag.max}"),
        ("tokens masked", f"{outcome.masked_fraction:.1%}", "wasted", f"{outcome.wasted_fraction:.1%}"),
        ("length ratio", figure(outcome.length_ratio, 2), "tokens of a rollout", figure(plan.rates.lengths.mean, 0)),
    ):
        facts.add_row(plain(name), plain(value), plain(other), plain(second))
    title = f"the recipe: engines {plan.current.engines}, window {plan.current.window}"
    panel = Panel(facts, title=title, title_align="left", expand=False)
    return Group(panel, _tried(plan), *(Text(f"• {sentence}") for sentence in plan.advice))


def _tried(plan: Plan) -> Table:
    """One line for each choice that was simulated."""
    table = Table(box=None, header_style="dim")
    for name in ("", "engines", "window", "steps/h", "trainer", "pool", "lag mean", "max", "masked", "wasted"):
        table.add_column(name, justify="right" if name else "left")
    for choice in plan.tried:
        advised, outcome = choice is plan.advised, choice.outcome
        mark = "advised" if advised else "recipe" if choice is plan.current else ""
        cells = (
            mark,
            choice.engines,
            choice.window,
            figure(outcome.steps_per_hour, 1),
            f"{outcome.trainer:.0%}",
            f"{outcome.pool:.0%}",
            figure(outcome.lag.mean, 2),
            outcome.lag.max,
            f"{outcome.masked_fraction:.1%}",
            f"{outcome.wasted_fraction:.1%}",
        )
        table.add_row(*(plain(cell, "bold" if advised else "" if mark else "dim") for cell in cells))
    return table
