"""The short benchmarks, one table: ours, the plain way, and the ratio between them. Writes
benchmarks/results/*.json."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import detection, logprobs, losses, packing, resume, rewards, scheduling, store

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Measure everything and print the table."""
    RESULTS.mkdir(exist_ok=True)
    print(f"{'':60} {'ours':>10} {'plain':>10} {'ratio':>7}")
    measures = {
        "store": store.measure,
        "logprobs": logprobs.measure,
        "losses": losses.measure,
        "rewards": rewards.measure,
        "resume": resume.table,
        "detection": detection.measure,
    }
    for name, measure in measures.items():
        rows = measure()
        (RESULTS / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        for row in rows:
            ratio = row["ours"] / row["theirs"] if row["theirs"] else float("nan")
            print(f"{row['case']:60} {row['ours']:>10.3g} {row['theirs']:>10.3g} {ratio:>7.2f}  {row['unit']}")
    packed = packing.measure(8192, 8, 32768, repeats=5)
    (RESULTS / "packing.json").write_text(json.dumps(packed, indent=1) + "\n", encoding="utf-8")
    print("packing 8192 sequences: " + ", ".join(f"{key} {value}" for key, value in packed.items()))
    scheduling.write(scheduling.measure(steps=200))


if __name__ == "__main__":
    main()
