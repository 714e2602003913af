"""`forebay status`: where a run is, in one screen and at a cost that does not grow with its history.

Totals come from the newest ledger footer, the frontier from `flows.views.standing`, rates from the last few steps.
"""

import os
import socket
from typing import Any, Literal

import psutil
from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table

from flows.live import clock
from flows.run import RunRefused, check_owner, finished_at
from flows.views.series import step_points
from flows.views.standing import RecordedRun, recorded_run, standing
from flows.views.terminal import figure, plain
from grpo_core.config import RunConfig
from grpo_core.evaluation import living_evaluations, read_evaluation
from storage.attempts import AttemptClaim, living_chain, read_attempt
from storage.layout import LedgerName
from storage.ledger import Totals, newest_footer
from storage.objects import ObjectStore

State = Literal["new", "running", "stopped", "finished"]
# Rates are those of the last few steps: enough to be calm, few enough to show a change.
RECENT_STEPS = 8
COLOURS: dict[State, str] = {"new": "dim", "running": "green", "stopped": "yellow", "finished": "blue"}


def status(store: ObjectStore) -> dict[str, Any]:
    """The state of a run as plain JSON values; what is not known yet is None.

    `leased` counts the ordinals that are trained, dropped, buffered or in flight; `lag` and `tokens` are those of the
    living history; `evaluation` is its newest one; `tokens_per_second` counts generated tokens of trained groups over
    the last few steps of the living attempt. Raise RunRefused when the store holds no run.
    """
    run = recorded_run(store)
    newest, step = newest_footer(store), newest_footer(store, steps_only=True)
    totals = Totals() if newest is None else newest.totals
    done = 0 if step is None else step.name.step
    place = standing(store, run)
    counts = place.frontier.counts()
    state = run_state(store, run)
    tokens_per_second, seconds_per_step = _pace(store, run, None if step is None else step.name)
    eta = (
        None
        if seconds_per_step is None or state != "running"
        else seconds_per_step * (run.window.last_step(done=done, settled=totals.settled) - done)
    )
    return {
        "run_id": run.config.run_id,
        "state": state,
        "attempt": 0 if run.claim is None else run.claim.attempt,
        "step": done,
        "version": done // run.config.refit.every_steps,
        "frontier": place.frontier.frontier,
        "cut": place.cut,
        "leased": counts.leased - counts.returned,
        "trained": counts.trained,
        "buffered": counts.buffered,
        "in_flight": counts.in_flight,
        "dropped": counts.dropped,
        "reward": {"first": totals.reward_first, "last": totals.reward_last, "best": totals.reward_best},
        "lag": {"mean": totals.lag_mean, "p95": totals.lag(0.95), "max": max(totals.lag_tokens, default=None)},
        "tokens": {
            "generated": totals.tokens_generated,
            "trained": totals.tokens_trained,
            "masked": totals.tokens_masked,
        },
        "tokens_per_second": tokens_per_second,
        "eta_seconds": 0.0 if state == "finished" else eta,
        "evaluation": newest_evaluation(store, run.config),
    }


def newest_evaluation(store: ObjectStore, config: RunConfig) -> dict[str, Any] | None:
    """The newest evaluation of the living history."""
    chain, every = living_chain(store), config.refit.every_steps
    names = living_evaluations(store, chain, every_steps=every)
    if not names:
        return None
    evaluation = read_evaluation(store, names[-1], config)
    return {
        "version": evaluation.version,
        "step": evaluation.step,
        "scores": {metric: score.mean for metric, score in evaluation.scores.items()},
        "version_purity": evaluation.purity,
        "due_version": evaluation.due,
    }


def run_state(store: ObjectStore, run: RecordedRun) -> State:
    """`new` until an attempt is claimed; `running` while the owner shows signs of life."""
    if run.claim is None:
        return "new"
    if finished_at(run.config, store, run.window) is not None:
        return "finished"
    return "running" if _owner_lives(store, run.claim) else "stopped"


def _owner_lives(store: ObjectStore, claim: AttemptClaim) -> bool:
    if (claim.host, claim.pid) == (socket.gethostname(), os.getpid()):
        return abs(psutil.Process().create_time() - claim.pid_started_at) < 1.0
    try:
        check_owner(store, take_over=False)
    except RunRefused:
        return True
    return False


def _pace(store: ObjectStore, run: RecordedRun, newest: LedgerName | None) -> tuple[float | None, float | None]:
    """(generated tokens per second, seconds per step) over the last steps of the attempt that made the newest one."""
    if newest is None:
        return None, None
    parent = read_attempt(store, newest.attempt).parent
    first = max(newest.step - RECENT_STEPS, 0 if parent is None else parent[1]) + 1
    names = [LedgerName(newest.attempt, step) for step in range(first, newest.step + 1)]
    points = step_points(store, names, every_steps=run.config.refit.every_steps)
    seconds = sum(point.seconds for point in points)
    if seconds <= 0:
        return None, None
    return sum(point.generated_tokens for point in points) / seconds, seconds / len(points)


def render_status(values: dict[str, Any]) -> RenderableType:
    """`status` for people."""
    reward, lag, tokens = values["reward"], values["lag"], values["tokens"]
    dropped = ", ".join(f"{count} {reason}" for reason, count in values["dropped"].items()) or "0"
    grid = Table.grid(padding=(0, 3))
    for style in ("dim", "", "dim", ""):
        grid.add_column(style=style)
    rows: list[tuple[str, object, str, object]] = [
        ("step", values["step"], "version", values["version"]),
        ("frontier", values["frontier"], "cut", values["cut"]),
        ("leased", values["leased"], "trained", values["trained"]),
        ("buffered", values["buffered"], "in flight", values["in_flight"]),
        ("reward first", figure(reward["first"]), "last, best", f"{figure(reward['last'])}, {figure(reward['best'])}"),
        ("lag mean", figure(lag["mean"], 2), "p95, max", f"{figure(lag['p95'], 0)}, {figure(lag['max'], 0)}"),
        ("tokens generated", figure(tokens["generated"], 0), "trained", figure(tokens["trained"], 0)),
        ("tokens masked", figure(tokens["masked"], 0), "tokens/s", figure(values["tokens_per_second"], 0)),
        ("dropped", dropped, "time left", clock(values["eta_seconds"])),
    ]
    if evaluation := values["evaluation"]:
        scores = ", ".join(f"{metric} {figure(value)}" for metric, value in evaluation["scores"].items())
        due = "–" if evaluation["due_version"] is None else str(evaluation["due_version"])
        rows.append((f"held-out, version {evaluation['version']}", scores, "due at version", due))
    for name, value, other, second in rows:
        grid.add_row(plain(name), plain(value), plain(other), plain(second))
    title = plain(f"{values['run_id']} · {values['state']} · attempt {values['attempt']}")
    return Panel(grid, title=title, title_align="left", expand=False, border_style=COLOURS[values["state"]])
