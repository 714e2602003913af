"""What overlapping generation and training is worth, and a second engine: the quickstart with window 0, with its own
window, and with its window and two engines.

    python -m benchmarks.asynchrony --steps 40

Same recipe, same seed, same number of steps. Utilisation is the share of the time from the first to the last step in
which the trainer was in a step, or an engine had a request; both come from records of the run. On a machine whose cores
are all busy with one engine, a second one only shares them: what it gains is seen where engines have their own devices.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from storage import layout
from storage.ledger import ledger_names, read_ledger_footer
from storage.objects import ObjectStore
from storage.schema import decode

RECIPE = Path("deployments/recipes/quickstart.yaml")
RESULTS = Path("benchmarks/results")


# Name of a variant → what it changes in the recipe.
VARIANTS = {
    "window-0": {"grpo.async_grpo.max_trajectory_age_steps": 0},
    "window-2": {},
    "window-2-two-engines": {"pool.engines": 2},
}


def run_variant(variant: str, steps: int, root: str) -> dict[str, float]:
    """Train one variant and read where the time went."""
    name = f"asynchrony-{variant}"
    settings = {"grpo.max_num_steps": steps, "evaluation.at_start": "false", "evaluation.at_end": "false"}
    overrides = [
        argument for key, value in {**settings, **VARIANTS[variant]}.items() for argument in ("--set", f"{key}={value}")
    ]
    arguments = ["train", str(RECIPE), "--run-id", name, "--root", root, "--no-prefect", *overrides]
    subprocess.run([sys.executable, "-m", "flows.cli", *arguments], check=True)
    return read_run(ObjectStore.open(layout.run_root(root, name), read_only=True))


def read_run(store: ObjectStore) -> dict[str, float]:
    """Seconds per step and utilisation of both sides, without the first step, which waits for the first rollouts."""
    metrics = [read_ledger_footer(store, name).metrics for name in ledger_names(store) if name.drops is None][1:]
    refits = [json.loads(store.get(key)) for key in store.list(layout.refits_prefix(1), recursive=True)][2:]
    step = sum(entry["step_seconds"] for entry in metrics)
    wait = sum(entry["wait_seconds"] for entry in metrics)
    refit = sum(sum(record["seconds"].values()) for record in refits)
    total = step + wait + refit
    return {
        "seconds_per_step": total / len(metrics),
        "trainer_utilisation": step / total,
        "engine_utilisation": busy_seconds(store) / total,
        "wait_share": wait / total,
        "refit_share": refit / total,
        "lag_mean": sum(entry["lag_mean"] for entry in metrics) / len(metrics),
        "engines": len({engine for record in refits for engine in record["engines"]}),
    }


def busy_seconds(store: ObjectStore) -> float:
    """Seconds in which at least one request was in an engine: the union of all rollouts' spans."""
    spans = set()
    for key in store.list(layout.trajectories_prefix(1), recursive=True):
        table, _ = decode(store.get(key), ["submitted_at", "finished_at"], name=key)
        spans |= set(
            zip(table.column("submitted_at").to_pylist(), table.column("finished_at").to_pylist(), strict=True)
        )
    busy, end = 0.0, 0.0
    for start, finish in sorted(spans):
        busy += max(0.0, finish - max(start, end))
        end = max(end, finish)
    return busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--root", default="./forebay-runs")
    arguments = parser.parse_args()
    rows = {variant: run_variant(variant, arguments.steps, arguments.root) for variant in VARIANTS}
    for variant, row in rows.items():
        print(f"{variant:22}" + "  ".join(f"{name} {value:.3g}" for name, value in row.items()))
    base = rows["window-2"]["seconds_per_step"]
    print(f"speed-up of window 2 over window 0: {rows['window-0']['seconds_per_step'] / base:.2f}")
    print(f"speed-up of two engines over one: {base / rows['window-2-two-engines']['seconds_per_step']:.2f}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "asynchrony.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
