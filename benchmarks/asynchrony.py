"""What overlapping generation and training is worth: the quickstart with its window, and with window 0.

    python -m benchmarks.asynchrony --steps 40

Same recipe, same seed, same number of steps; only `max_trajectory_age_steps` differs. Utilisation is the share of the
time from the first to the last step in which the trainer was in a step, or an engine had a request; both come from
records of the run.
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


def run_window(window: int, steps: int, root: str) -> dict[str, float]:
    """Train with one window and read where the time went."""
    name = f"asynchrony-window-{window}"
    settings = (f"grpo.max_num_steps={steps}", f"grpo.async_grpo.max_trajectory_age_steps={window}")
    overrides = [
        argument
        for setting in (*settings, "evaluation.at_start=false", "evaluation.at_end=false")
        for argument in ("--set", setting)
    ]
    arguments = ["train", str(RECIPE), "--run-id", name, "--root", root, "--no-prefect", *overrides]
    subprocess.run([sys.executable, "-m", "flows.cli", *arguments], check=True)
    return read_window(ObjectStore.open(layout.run_root(root, name), read_only=True), window)


def read_window(store: ObjectStore, window: int) -> dict[str, float]:
    """Seconds per step and utilisation of both sides, without the first step, which waits for the first rollouts."""
    metrics = [read_ledger_footer(store, name).metrics for name in ledger_names(store) if name.drops is None][1:]
    refits = [json.loads(store.get(key)) for key in store.list(layout.refits_prefix(1), recursive=True)][2:]
    step = sum(entry["step_seconds"] for entry in metrics)
    wait = sum(entry["wait_seconds"] for entry in metrics)
    refit = sum(sum(record["seconds"].values()) for record in refits)
    total = step + wait + refit
    return {
        "window": window,
        "seconds_per_step": total / len(metrics),
        "trainer_utilisation": step / total,
        "engine_utilisation": busy_seconds(store) / total,
        "wait_share": wait / total,
        "refit_share": refit / total,
        "lag_mean": sum(entry["lag_mean"] for entry in metrics) / len(metrics),
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
    rows = [run_window(window, arguments.steps, arguments.root) for window in (0, 2)]
    for row in rows:
        print("  ".join(f"{name} {value:.3g}" for name, value in row.items()))
    print(f"speed-up of window 2 over window 0: {rows[0]['seconds_per_step'] / rows[1]['seconds_per_step']:.2f}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "asynchrony.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
