"""Our schedule beside the rules of five other systems, in one simulated run, and how mean lag follows supply.

    python -m benchmarks.scheduling --steps 200

Each step trains 64 rollouts and takes 1 s; a rollout takes 2 s in the mean, log-normal with sigma, and there are places
for 160, a quarter more than a trainer that never waits needs. All rules meet the same rollouts. What is counted is
said in `grpo_core.schedule.outcome`. The curve lets the engines be slower and faster: supply is what a full pool makes
over what the trainer takes. Writes benchmarks/results/scheduling.json and scheduling.png.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from grpo_core.schedule.baselines import baselines
from grpo_core.schedule.outcome import Outcome
from grpo_core.schedule.pool_model import PoolModel
from grpo_core.schedule.rules import Windowed
from grpo_core.schedule.scenario import Scenario, TrainerModel
from grpo_core.schedule.simulate import simulate
from grpo_core.schedule.window import Window
from grpo_core.schedule.workload import LogNormal, Workload

RESULTS = Path(__file__).parent / "results"
PROMPTS, PLACES, TOKENS, SECONDS = 64, 160, 2000.0, 2.0
OURS = "Forebay"
EXACT = "exact target (NeMo RL)"
CASES = ((1.0, 4), (1.5, 8))
SUPPLIES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
CURVE_SIGMA, CURVE_WINDOW = 0.5, 4


def scenario(sigma: float, window: int, steps: int, *, seconds: float = SECONDS) -> Scenario:
    """The run of the docstring, in which a mean rollout takes `seconds`."""
    return Scenario(
        workload=Workload(LogNormal(TOKENS, sigma), seed=1),
        pool=PoolModel(engines=1, slots=PLACES, tokens_per_second=TOKENS / seconds),
        trainer=TrainerModel(prompts_per_step=PROMPTS, step_seconds=1.0),
        steps=steps,
        max_age=window,
    )


def ours(case: Scenario) -> Outcome:
    """Our schedule, in a run that goes on after what is observed."""
    window = Window(prompts_per_step=PROMPTS, max_age=case.max_age, every_steps=1, steps=10**9)
    return simulate(case, lambda: Windowed(window))


def compare(sigma: float, window: int, steps: int) -> list[dict[str, Any]]:
    """One row for each rule, ours first."""
    case = scenario(sigma, window, steps)
    outcomes = {OURS: ours(case)}
    for name, rule in baselines(PROMPTS, window).items():
        outcomes[name] = simulate(case, lambda rule=rule: rule)
    return [
        {
            "rule": name,
            "sigma": sigma,
            "window": window,
            **outcome.to_json(),
            "age_mean": outcome.age_mean,
            "over_window": outcome.over_window,
            "wasted_groups": outcome.wasted_groups,
        }
        for name, outcome in outcomes.items()
    ]


def lag_curve(steps: int) -> list[dict[str, float]]:
    """Mean lag of tokens and of groups' oldest tokens, ours and with an exact target, for each supply."""
    points = []
    for supply in SUPPLIES:
        case = scenario(CURVE_SIGMA, CURVE_WINDOW, steps, seconds=PLACES / PROMPTS / supply)
        exact = baselines(PROMPTS, CURVE_WINDOW)[EXACT]
        found = {"ours": ours(case), "exact": simulate(case, lambda exact=exact: exact)}
        figures = {"supply": supply}
        for name, outcome in found.items():
            figures[f"{name}_lag"] = outcome.lag.mean
            figures[f"{name}_age"] = outcome.age_mean
            figures[f"{name}_efficiency"] = outcome.efficiency
        points.append(figures)
    return points


def draw(points: list[dict[str, float]], path: Path) -> None:
    """The curve as a picture."""
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    axes = figure.add_subplot()
    supply = [point["supply"] for point in points]
    for name, label, colour in (("exact", EXACT, "#b5651d"), ("ours", OURS, "#1f6f8b")):
        axes.plot(supply, [point[f"{name}_age"] for point in points], "o-", color=colour, label=f"{label}, groups")
        axes.plot(supply, [point[f"{name}_lag"] for point in points], "o--", color=colour, label=f"{label}, tokens")
    axes.axhline(CURVE_WINDOW, color="#888888", linewidth=0.8)
    axes.text(supply[-1], CURVE_WINDOW, "window", ha="right", va="bottom", color="#666666")
    axes.set_xlabel("supply: speed of the pool ÷ speed of the trainer")
    axes.set_ylabel("mean lag, versions")
    axes.set_ylim(0, CURVE_WINDOW + 0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, handlelength=3.5)
    figure.savefig(path, dpi=150, metadata={"Software": None})


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The comparison as lines of text."""
    lines = [
        f"{'sigma, window; rule':44} {'efficiency':>10} {'lag mean':>8} {'max':>4} {'length':>6} {'wasted':>6} {'masked':>6} {'too old':>7}"
    ]
    for row in rows:
        case = f"{row['sigma']:g}, {row['window']}; {row['rule']}"
        lines.append(
            f"{case:44} {row['efficiency']:>10.3f} {row['lag']['mean']:>8.2f} "
            f"{row['lag']['max']:>4} {row['length_ratio']:>6.2f} {row['wasted_fraction']:>6.2f} {row['masked_fraction']:>6.2f} "
            f"{row['over_window']:>7.2f}"
        )
    return lines


def measure(steps: int) -> dict[str, Any]:
    """Everything, as it is written to the results."""
    return {
        "rules": [row for sigma, window in CASES for row in compare(sigma, window, steps)],
        "lag": lag_curve(steps),
    }


def write(found: dict[str, Any]) -> None:
    """Print the tables; keep the figures and the picture."""
    for line in table(found["rules"]):
        print(line)
    print(f"mean lag by supply, window {CURVE_WINDOW}, ours (and with an exact target):")
    for point in found["lag"]:
        print(
            f"  supply {point['supply']:4.2f}: tokens {point['ours_lag']:.2f} ({point['exact_lag']:.2f}), "
            f"groups {point['ours_age']:.2f} ({point['exact_age']:.2f}), "
            f"efficiency {point['ours_efficiency']:.2f} ({point['exact_efficiency']:.2f})"
        )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "scheduling.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    draw(found["lag"], RESULTS / "scheduling.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    write(measure(parser.parse_args().steps))


if __name__ == "__main__":
    main()
