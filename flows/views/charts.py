"""Which figures of a run the report draws, and how they are called.

Contract: a chart without anything to draw is left out, and so is a curve that is always 0.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from flows.views import curves
from flows.views.curves import FIRST, QUIET, SECOND, THIRD, Line
from flows.views.series import StepPoint
from flows.views.terminal import visible
from grpo_core.evaluation import Evaluation
from storage.ledger import Totals

COLOURS = (FIRST, SECOND, THIRD, QUIET)


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure of the page; `svg` is markup of our own."""

    title: str
    note: str
    svg: Markup


@dataclass(frozen=True, slots=True)
class Plot:
    """Curves to be drawn together. `zero`: the y axis begins there."""

    title: str
    note: str
    lines: Sequence[Line]
    zero: bool = True


def step_charts(
    points: Sequence[StepPoint],
    pool: Mapping[str, Mapping[int, float]],
    evaluations: Sequence[Evaluation],
    restarts: Sequence[int],
) -> list[Chart]:
    """The curves over steps that there are figures for. `pool`: metric of the flow → step → value."""
    plots = [
        *_reward_plots(points, evaluations),
        *_objective_plots(points),
        *_rollout_plots(points),
        *_speed_plots(points, pool),
    ]
    charts = [
        Chart(plot.title, plot.note, Markup(curves.lines(plot.title, plot.lines, restarts=restarts, zero=plot.zero)))
        for plot in plots
        if plot.lines
    ]
    timed = [point for point in points if point.seconds > 0]
    if not timed:
        return charts
    layers = {
        "wait": [point.wait_seconds for point in timed],
        "step": [point.step_seconds for point in timed],
        "refit": [point.refit_seconds for point in timed],
    }
    stack = curves.stack("Time per step", [point.name.step for point in timed], layers)
    return [*charts, Chart("Time per step", "seconds", Markup(stack))]


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


def _reward_plots(points: Sequence[StepPoint], evaluations: Sequence[Evaluation]) -> list[Plot]:
    reward = _curves(points, ("reward_mean", "training groups", FIRST))
    reward += [
        _held_out(evaluations, metric, f"held-out, {metric}", colour)
        for metric, colour in (("sampled", SECOND), ("greedy", THIRD))
        if any(metric in evaluation.scores for evaluation in evaluations)
    ]
    sources = dict.fromkeys(name for point in points for name in point.metrics if name.startswith("reward/"))
    # One alone is the reward.
    parts = list(sources)[: len(COLOURS)] if len(sources) > 1 else []
    passed = [m for m in dict.fromkeys(m for each in evaluations for m in each.scores) if m.startswith("pass@")]
    # The fewest tries, the most, and those in the middle; with one alone there is no curve to compare.
    chosen = list(dict.fromkeys([passed[0], passed[len(passed) // 2], passed[-1]])) if len(passed) > 1 else []
    return [
        Plot("Reward", "mean; held-out prompts with 95 % intervals", reward),
        Plot(
            "Reward by source",
            "mean, before its weight",
            _curves(
                points,
                *(
                    (name, visible(name.partition("/")[2]), colour)
                    for name, colour in zip(parts, COLOURS, strict=False)
                ),
            ),
        ),
        Plot(
            "Passed in k tries",
            "share of held-out prompts, with 95 % intervals",
            [_held_out(evaluations, metric, metric, colour) for metric, colour in zip(chosen, COLOURS, strict=False)],
        ),
    ]


def _objective_plots(points: Sequence[StepPoint]) -> list[Plot]:
    sizes = [
        (point.name.step, point.metrics["effective_sample_size"] / point.metrics["trained_tokens"])
        for point in points
        if "effective_sample_size" in point.metrics and point.metrics.get("trained_tokens")
    ]
    return [
        Plot("Loss", "of the whole step", _curves(points, ("loss", "loss", FIRST)), zero=False),
        Plot("Entropy", "nats per token", _curves(points, ("entropy", "entropy", FIRST))),
        Plot("Gradient norm", "before clipping", _curves(points, ("grad_norm", "gradient norm", FIRST))),
        Plot(
            "Divergence",
            "nats per token, estimated at the sampled tokens",
            _curves(
                points,
                ("gen_kl_error", "sampled with ‖ trained", FIRST),
                ("kl", "step start ‖ now", SECOND),
                ("kl_reference", "reference", THIRD),
            ),
        ),
        Plot(
            "Effective sample size",
            "of the importance weights, as a share of the trained tokens",
            [_line("effective sample size", sizes, FIRST)] if sizes else [],
        ),
    ]


def _rollout_plots(points: Sequence[StepPoint]) -> list[Plot]:
    several = any(point.metrics.get("rollout/turns_max", 1.0) > 1 for point in points)
    return [
        Plot(
            "Groups and rollouts",
            "shares of those of the step",
            _curves(
                points,
                ("zero_variance_share", "groups of equal rewards", FIRST),
                ("truncated_rollouts", "truncated", SECOND),
                ("unscorable_rollouts", "without a reward", THIRD),
            ),
        ),
        Plot(
            "Completion length",
            "tokens",
            _curves(points, ("completion_tokens_mean", "mean", FIRST), ("completion_tokens_max", "longest", SECOND)),
        ),
        Plot(
            "Turns",
            "of a rollout",
            _curves(points, ("rollout/turns_mean", "mean", FIRST), ("rollout/turns_max", "most", SECOND))
            if several
            else [],
        ),
    ]


def _speed_plots(points: Sequence[StepPoint], pool: Mapping[str, Mapping[int, float]]) -> list[Plot]:
    timed = [(point.name.step, point.generated_tokens / point.seconds) for point in points if point.seconds > 0]
    engines = [
        _line(name, sorted(pool[metric].items()), colour)
        for metric, name, colour in (
            ("pool/utilisation", "busy", FIRST),
            ("pool/held_back", "held back by the window", SECOND),
        )
        if any(pool.get(metric, {}).values())
    ]
    return [
        Plot(
            "Trainer",
            "shares of the wall time from the end of one step to that of the next",
            _curves(points, ("trainer_utilisation", "busy", FIRST), ("wait_share", "waiting for groups", SECOND)),
        ),
        Plot("Engines", "shares of the minute before the end of a step", engines),
        Plot(
            "Throughput",
            "generated tokens of trained groups per second",
            [_line("tokens per second", timed, FIRST)] if timed else [],
        ),
    ]


def _held_out(evaluations: Sequence[Evaluation], metric: str, name: str, colour: str) -> Line:
    measured = [(each.step, each.scores[metric]) for each in evaluations if metric in each.scores]
    errors = [score.interval for _, score in measured]
    return Line(name, [step for step, _ in measured], [score.mean for _, score in measured], colour, errors=errors)


def _curves(points: Sequence[StepPoint], *wanted: tuple[str, str, str]) -> list[Line]:
    """A line for each (metric, name, colour) that was measured and is not always 0."""
    found = []
    for metric, name, colour in wanted:
        values = [(point.name.step, point.metrics[metric]) for point in points if metric in point.metrics]
        if any(value != 0 for _, value in values):
            found.append(_line(name, values, colour))
    return found


def _line(name: str, values: Iterable[tuple[int, float]], colour: str) -> Line:
    pairs = list(values)
    return Line(name, [step for step, _ in pairs], [value for _, value in pairs], colour, smooth=True)
