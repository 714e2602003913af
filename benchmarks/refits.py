"""Whether fifty refits of a real engine stay exact and leave nothing behind, for every family and way to keep a head.

    python -m benchmarks.refits --refits 50 --workers 2

Each line is one vLLM engine on this machine with a random model of its own: the largest difference of its log-probs to the
trainer's over all refits, in nats; by how much the engine's processes and this one grew after the first ten refits, in
copies of the weights; and the mean seconds of a refit. With `--workers 2` the engines are tensor-parallel. A minute per
engine is its start. Status 1 if a difference exceeds 1e-4.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM

from benchmarks.asynchrony import RESULTS
from grpo_core.refit.control import EngineAddress
from grpo_core.refit.coordinator import refit_weights
from grpo_core.refit.gloo import GlooTransfer
from grpo_core.trajectory import Stamp
from tests.grpo_core.refit.real import SETTINGS, canary_of, randomise, weights_of
from tests.vllm_engine import running_engines, write_tiny_model

FAMILIES = ("llama", "qwen2", "qwen3")
WARM = 10
TOLERANCE_NATS = 1e-4


def refit_many_times(family: str, *, tied: bool, refits: int, workers: int, directory: Path) -> dict[str, Any]:
    """Start an engine, refit it so many times with new weights each time, and tell what was seen."""
    path = write_tiny_model(directory / "model", family, tied=tied)  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    size = sum(tensor.nbytes for _, tensor in weights_of(model))
    differences, seconds, before = [], [], {}
    with running_engines([path], directory, tensor_parallel_size=workers) as (engine,):
        transfer, address = GlooTransfer(), EngineAddress("engine", engine.url)

        def memory() -> dict[str, int]:
            return {"engine": engine.memory(), "trainer": psutil.Process().memory_info().rss}

        for version in range(refits):
            if version == min(WARM, refits - 1):
                before = memory()
            randomise(model, seed=version)
            canary, began = canary_of(model), time.monotonic()
            result = refit_weights(weights_of(model), [address], Stamp(1, version), transfer, SETTINGS, canary=canary)
            seconds.append(time.monotonic() - began)
            differences.append(result.canary.get("engine", float("inf")))
        grown = {name: (now - before[name]) / size for name, now in memory().items()}
    return {
        "model": f"{family}, {'tied' if tied else 'untied'}",
        "workers": workers,
        "refits": refits,
        "largest_difference_nats": max(differences),
        "engine_growth_copies": round(grown["engine"], 2),
        "trainer_growth_copies": round(grown["trainer"], 2),
        "seconds": sum(seconds) / len(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--refits", type=int, default=50)
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    rows = []
    for family in FAMILIES:
        for tied in (True, False):
            with tempfile.TemporaryDirectory(prefix="forebay-refits-") as directory:
                rows.append(
                    refit_many_times(
                        family,
                        tied=tied,
                        refits=arguments.refits,
                        workers=arguments.workers,
                        directory=Path(directory),
                    )
                )
            print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"refits-{arguments.workers}.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    sys.exit(any(row["largest_difference_nats"] > TOLERANCE_NATS for row in rows))


if __name__ == "__main__":
    main()
