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

from flows.live import clock
from flows.views.charts import lag_chart, step_charts
from flows.views.samples import sample_rollouts
from flows.views.series import StepPoint, flow_points, spread, step_points
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
POOL = ("pool/utilisation", "pool/held_back")
TEMPLATE = "report.html.jinja"
PHASES = ("connect", "pause", "start", "transfer", "finish", "resume", "canary")


@dataclass(frozen=True, slots=True)
class EvaluatedMetric:
    """One metric of one evaluation."""

    version: int
    step: int
    score: Score


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
    shown = [names[index] for index in spread(len(names), MOST_POINTS)]
    points, pool = step_points(store, shown, every_steps=every), flow_points(store, shown, POOL)
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
        "charts": step_charts(points, pool, evaluations, restarts) + lag_chart(totals),
        "times": time_budget(points),
        "refits": refit_table(points),
        "canary": max(
            (value for point in points if point.refit for value in point.refit.canary.values()), default=None
        ),
        "waste": waste_table(store, living, totals),
        "spent": token_table(points),
        "tools": tool_table(points),
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


def waste_table(store: ObjectStore, living: Sequence[LedgerName], totals: Totals) -> list[dict[str, Any]]:
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


def token_table(points: Sequence[StepPoint]) -> list[dict[str, Any]]:
    """What became of the generated tokens that these steps decided about: (what, share), the largest waste first."""
    wasted: Counter[str] = Counter()
    for point in points:
        wasted.update(_family(point, "wasted_tokens/"))
    trained = sum(point.metrics.get("trained_tokens", 0.0) for point in points)
    total = trained + wasted.total()
    if not wasted.total():
        return []
    rows = [("trained", trained), *wasted.most_common()]
    return [{"what": what, "share": tokens / total} for what, tokens in rows if tokens]


def tool_table(points: Sequence[StepPoint]) -> list[dict[str, Any]]:
    """How the tools were used in these steps: (tool, calls per rollout, share that failed, seconds of a call)."""
    calls, failures, seconds = Counter[str](), Counter[str](), Counter[str]()
    for point in points:
        made = _family(point, "tool_calls/")
        calls.update(made)
        failures.update(_family(point, "tool_failures/"))
        seconds.update({name: made.get(name, 0.0) * mean for name, mean in _family(point, "tool_seconds/").items()})
    rollouts = sum(point.metrics.get("rollouts", 0.0) for point in points)
    return [
        {
            "tool": name,
            "calls": count / rollouts if rollouts else None,
            "failed": failures[name] / count,
            "seconds": seconds[name] / count,
        }
        for name, count in calls.most_common()
        if count
    ]


def _family(point: StepPoint, prefix: str) -> dict[str, float]:
    """The members of a family of metrics that the step has."""
    return {name.removeprefix(prefix): value for name, value in point.metrics.items() if name.startswith(prefix)}


def moment(seconds: float) -> str:
    """Unix seconds as a date and time."""
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M UTC")


def _config_text(run: RecordedRun) -> str:
    """The config as YAML. Options of the store are named, not shown: a page travels further than run.json."""
    values = run.config.model_dump(mode="json")
    values["storage"]["options"] = dict.fromkeys(values["storage"]["options"], "…")
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
