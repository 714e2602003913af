"""`forebay report`: one self-contained HTML page about a run, finished or not.

Contract: the page requests nothing, runs no script, and shows every text of a rollout escaped; what the run does not
have yet is left out with a word. Long runs are sampled: the cost is bounded but for the listing of names.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from flows.live import clock
from flows.views import curves
from flows.views.curves import FIRST, SECOND, THIRD, Line
from flows.views.samples import sample_rollouts
from flows.views.series import StepPoint, spread, step_points
from flows.views.standing import RecordedRun, read_decisions, recorded_run
from flows.views.status import status
from flows.views.terminal import figure, visible
from grpo_core.config import RunConfig
from grpo_core.evaluation import Evaluation, Score, living_evaluations, read_evaluations
from storage.attempts import Link, attempt_numbers, living_chain, read_attempt
from storage.layout import LedgerName
from storage.ledger import DROPPED, RETURNED, Totals, ledger_names, newest_footer
from storage.objects import ObjectStore

MOST_POINTS = 600
MOST_EVALUATIONS = 40
MOST_DROP_FILES = 400
TEMPLATE = "report.html.jinja"
PHASES = ("connect", "pause", "start", "transfer", "finish", "resume", "canary")


@dataclass(frozen=True, slots=True)
class EvaluatedMetric:
    """One metric of one evaluation."""

    version: int
    step: int
    score: Score


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure of the page; `svg` is markup of our own."""

    title: str
    note: str
    svg: Markup


def report(store: ObjectStore, output: Path) -> Path:
    """Write the page about the run in `store`; its path. Raise RunRefused when there is no run."""
    page = render(_content(store))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page, encoding="utf-8")
    return output


def render(content: Mapping[str, Any]) -> str:
    """The page of what `_content` found."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"figure": figure, "clock": clock, "visible": visible, "moment": moment}
    source = resources.files("flows.views").joinpath(TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(source).render(content)


def _content(store: ObjectStore) -> dict[str, Any]:
    run = recorded_run(store)
    living = ledger_names(store)
    names = [name for name in living if name.drops is None]
    every = run.config.refit.every_steps
    points = step_points(store, [names[index] for index in spread(len(names), MOST_POINTS)], every_steps=every)
    chain = living_chain(store)
    evaluations = evaluation_points(store, run.config, chain)
    footer = newest_footer(store)
    totals = Totals() if footer is None else footer.totals
    restarts = [link.last_step for link in chain if link.last_step is not None]
    return {
        "run": status(store),
        "steps": run.window.last_step(),
        "attempts": [read_attempt(store, number) for number in attempt_numbers(store)],
        "evaluations": evaluation_table(evaluations),
        "evaluated": evaluations,
        "charts": step_charts(points, evaluations, restarts) + lag_chart(totals),
        "times": time_budget(points),
        "refits": refit_table(points),
        "canary": max(
            (value for point in points if point.refit for value in point.refit.canary.values()), default=None
        ),
        "waste": waste_table(store, living, totals, run),
        "samples": sample_rollouts(store, names),
        "sampled": len(points) < len(names),
        "config": _config_text(run),
    }


def evaluation_points(store: ObjectStore, config: RunConfig, chain: Sequence[Link]) -> list[Evaluation]:
    """Evaluations of the living history by version, evenly spread where there are many."""
    names = living_evaluations(store, chain, every_steps=config.refit.every_steps)
    return read_evaluations(store, config, [names[index] for index in spread(len(names), MOST_EVALUATIONS)])


def evaluation_table(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """Per metric: the first version, the last one, and by how much it changed, with its 95 % interval."""
    table = []
    for metric in dict.fromkeys(metric for evaluation in evaluations for metric in evaluation.scores):
        measured = [evaluation for evaluation in evaluations if metric in evaluation.scores]
        first, last = (
            EvaluatedMetric(each.version, each.step, each.scores[metric]) for each in (measured[0], measured[-1])
        )
        change = (last.score.mean - first.score.mean, math.hypot(first.score.interval, last.score.interval))
        several = len(measured) > 1
        table.append(
            {"metric": metric, "first": first, "last": last if several else None, "change": change if several else None}
        )
    return table


def step_charts(points: Sequence[StepPoint], evaluations: Sequence[Evaluation], restarts: Sequence[int]) -> list[Chart]:
    """The curves over steps that there are figures for."""
    reward = _curves(points, ("reward_mean", "training groups", FIRST))
    for metric, colour in (("sampled", SECOND), ("greedy", THIRD)):
        measured = [(each.step, each.scores[metric]) for each in evaluations if metric in each.scores]
        if measured:
            x, y = [step for step, _ in measured], [score.mean for _, score in measured]
            errors = [score.interval for _, score in measured]
            reward.append(Line(f"held-out, {metric}", x, y, colour, errors=errors))
    specs = [
        ("Reward", "mean; held-out prompts with 95 % intervals", reward, True),
        ("Loss", "of the whole step", _curves(points, ("loss", "loss", FIRST)), False),
        ("Entropy", "nats per token", _curves(points, ("entropy", "entropy", FIRST)), True),
        ("Gradient norm", "before clipping", _curves(points, ("grad_norm", "gradient norm", FIRST)), True),
        (
            "Divergence",
            "nats per token, estimated at the sampled tokens",
            _curves(
                points,
                ("gen_kl_error", "sampled with ‖ trained", FIRST),
                ("kl", "step start ‖ now", SECOND),
                ("kl_reference", "reference", THIRD),
            ),
            True,
        ),
        (
            "Completion length",
            "tokens",
            _curves(points, ("completion_tokens_mean", "mean", FIRST), ("completion_tokens_max", "longest", SECOND)),
            True,
        ),
        (
            "Trainer",
            "shares of the wall time from the end of one step to that of the next",
            _curves(points, ("trainer_utilisation", "busy", FIRST), ("wait_share", "waiting for groups", SECOND)),
            True,
        ),
    ]
    charts = [
        Chart(title, note, Markup(curves.lines(title, lines, restarts=restarts, zero=zero)))
        for title, note, lines, zero in specs
        if lines
    ]
    timed = [point for point in points if point.seconds > 0]
    if timed:
        x = [point.name.step for point in timed]
        rate = Line("tokens per second", x, [point.generated_tokens / point.seconds for point in timed], smooth=True)
        layers = {
            "wait": [point.wait_seconds for point in timed],
            "step": [point.step_seconds for point in timed],
            "refit": [point.refit_seconds for point in timed],
        }
        throughput = curves.lines("Throughput", [rate], restarts=restarts, zero=True)
        charts.append(Chart("Throughput", "generated tokens of trained groups per second", Markup(throughput)))
        charts.append(Chart("Time per step", "seconds", Markup(curves.stack("Time per step", x, layers))))
    return charts


def lag_chart(totals: Totals) -> list[Chart]:
    """Trained tokens by lag, over the whole living history."""
    tokens = sum(totals.lag_tokens.values())
    if not tokens:
        return []
    shares = {lag: count / tokens for lag, count in sorted(totals.lag_tokens.items())}
    return [
        Chart(
            "Lag",
            "share of trained tokens by how many versions old they were",
            Markup(curves.bars("Lag", shares, x_label="versions")),
        )
    ]


def time_budget(points: Sequence[StepPoint]) -> list[dict[str, Any]]:
    """Mean seconds and share of each part of a step."""
    total = math.fsum(point.seconds for point in points)
    parts = (("wait", "wait_seconds"), ("step", "step_seconds"), ("refit", "refit_seconds"))
    seconds = {name: math.fsum(getattr(point, attribute) for point in points) for name, attribute in parts}
    return (
        [{"part": name, "mean": value / len(points), "share": value / total} for name, value in seconds.items()]
        if total > 0
        else []
    )


def refit_table(points: Sequence[StepPoint]) -> list[dict[str, Any]]:
    """Seconds of each phase over the refits: mean, 95th percentile, longest."""
    phases: dict[str, list[float]] = {}
    for point in points:
        for phase, seconds in (point.refit.seconds if point.refit else {}).items():
            phases.setdefault(phase, []).append(seconds)
    return [
        {
            "phase": phase,
            "mean": math.fsum(values) / len(values),
            "p95": sorted(values)[math.ceil(0.95 * len(values)) - 1],
            "max": max(values),
        }
        for phase, values in sorted(
            phases.items(), key=lambda item: PHASES.index(item[0]) if item[0] in PHASES else len(PHASES)
        )
    ]


def waste_table(
    store: ObjectStore, living: Sequence[LedgerName], totals: Totals, run: RecordedRun
) -> list[dict[str, Any]]:
    """What was generated and not trained, or trained and lost: (what, cause, count, unit)."""
    rows = [
        {"what": DROPPED, "cause": reason, "count": count, "unit": "groups"} for reason, count in totals.dropped.items()
    ]
    files = [name for name in living if name.drops is not None]
    if len(files) <= MOST_DROP_FILES:
        decisions = (decision for name in files for decision in read_decisions(store, name))
        causes = Counter(decision.reason or "no reason given" for decision in decisions if decision.state == RETURNED)
    else:
        causes = Counter({"all causes": totals.returned} if totals.returned else {})
    rows += [
        {"what": RETURNED, "cause": cause, "count": count, "unit": "groups"} for cause, count in causes.most_common()
    ]
    if totals.tokens_masked:
        rows.append(
            {"what": "masked", "cause": "older than the window", "count": totals.tokens_masked, "unit": "tokens"}
        )
    known = set(living)
    lost = Counter(
        name.attempt for name in ledger_names(store, all_attempts=True) if name not in known and name.drops is None
    )
    for attempt, count in lost.items():
        rows.append(
            {
                "what": "trained again",
                "cause": f"attempt {attempt} ended after its last checkpoint",
                "count": count,
                "unit": "steps",
            }
        )
    return rows


def moment(seconds: float) -> str:
    """Unix seconds as a date and time."""
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M UTC")


def _curves(points: Sequence[StepPoint], *wanted: tuple[str, str, str]) -> list[Line]:
    """A line for each (metric, name, colour) that was measured and is not always 0."""
    found = []
    for metric, name, colour in wanted:
        values = [(point.name.step, point.metrics[metric]) for point in points if metric in point.metrics]
        if any(value != 0 for _, value in values):
            found.append(Line(name, [step for step, _ in values], [value for _, value in values], colour, smooth=True))
    return found


def _config_text(run: RecordedRun) -> str:
    """The config as YAML. Options of the store are named, not shown: a page travels further than run.json."""
    values = run.config.model_dump(mode="json")
    values["storage"]["options"] = dict.fromkeys(values["storage"]["options"], "…")
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
