"""Does the quickstart learn, whatever the seed? Runs it once per seed and prints the table.

    python -m benchmarks.learning --seeds 5

The seed changes the policy's initial weights, its warm start and every sampled token. A run that is finished already
is only read again. Takes a few minutes per seed on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from flows.views.standing import recorded_run
from grpo_core.evaluation import read_evaluations
from storage import layout
from storage.objects import ObjectStore

RECIPE = Path("deployments/recipes/quickstart.yaml")
RESULTS = Path("benchmarks/results")


def run_seed(seed: int, root: str) -> dict:
    """Train one seed and read its first and last evaluation."""
    name = f"quickstart-seed-{seed}"
    began = time.monotonic()
    arguments = ["train", str(RECIPE), "--run-id", name, "--root", root, "--set", f"seed={seed}", "--no-prefect"]
    subprocess.run([sys.executable, "-m", "flows.cli", *arguments], check=True)
    seconds = time.monotonic() - began
    store = ObjectStore.open(layout.run_root(root, name), read_only=True)
    first, *_, last = read_evaluations(store, recorded_run(store).config)
    return {
        "seed": seed,
        "seconds": round(seconds),
        "samples": first.scores["sampled"].samples,
        **{f"{mode}_first": first.scores[mode].mean for mode in ("sampled", "greedy")},
        **{f"{mode}_last": last.scores[mode].mean for mode in ("sampled", "greedy")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--root", default="./forebay-runs")
    arguments = parser.parse_args()
    rows = [run_seed(seed, arguments.root) for seed in range(arguments.seeds)]
    print(f"{'seed':>4} {'sampled':>15} {'rise':>7} {'greedy':>15} {'seconds':>8}")
    for row in rows:
        rise = row["sampled_last"] - row["sampled_first"]
        sampled = f"{row['sampled_first']:.3f} → {row['sampled_last']:.3f}"
        greedy = f"{row['greedy_first']:.3f} → {row['greedy_last']:.3f}"
        print(f"{row['seed']:>4} {sampled:>15} {rise:>+7.3f} {greedy:>15} {row['seconds']:>8}")
    risen = sum(row["sampled_last"] - row["sampled_first"] >= 0.2 for row in rows)
    print(f"{risen} of {len(rows)} seeds rose by at least 0.2")
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "learning.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
