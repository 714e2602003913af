"""How fast packing is, how full its rows are, and how even the work of a micro-batch is.

Prints one JSON object per case. `fill`: tokens over the space of all rows. `imbalance`: Σ L² of the heaviest row over
the mean of its micro-batch, averaged over micro-batches weighted by their work. Of groups that share a prompt: the
micro-batches that it takes when prompts go through the model once, and when they do not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from grpo_core.training.packing import Plan, pack
from grpo_core.training.sharing import pack_groups


def lognormal_lengths(count: int, seed: int) -> list[int]:
    """Lengths of `count` rollouts: log-normal with mean-log 7 and sigma 1, clipped to 16 … 32768 tokens."""
    drawn = np.random.default_rng(seed).lognormal(7.0, 1.0, count)
    return [int(length) for length in np.clip(drawn, 16, 32768)]


def fill(plan: Plan, lengths: list[int], token_budget: int) -> float:
    """Share of the plan's token space that holds tokens."""
    rows = [row for micro_batch in plan.micro_batches for row in micro_batch]
    return sum(lengths[index] for row in rows for index in row) / (len(rows) * token_budget)


def imbalance(plan: Plan, lengths: list[int]) -> float:
    """Time lost to waiting: Σ of each micro-batch's heaviest row over Σ of its mean row."""
    work = [[sum(lengths[i] ** 2 for i in row) for row in micro_batch] for micro_batch in plan.micro_batches]
    return sum(max(rows) for rows in work) / sum(sum(rows) / len(rows) for rows in work)


def measure(count: int, rows: int, token_budget: int, repeats: int) -> dict[str, float]:
    """Pack several draws; time is the median of the processor time of one call."""
    seconds, fills, imbalances = [], [], []
    for seed in range(repeats):
        lengths = lognormal_lengths(count, seed)
        started = time.process_time()
        plan = pack(lengths, rows=rows, token_budget=token_budget)
        seconds.append(time.process_time() - started)
        fills.append(fill(plan, lengths, token_budget))
        imbalances.append(imbalance(plan, lengths))
    return {
        "sequences": count,
        "rows": rows,
        "token_budget": token_budget,
        "milliseconds": round(statistics.median(seconds) * 1e3, 2),
        "fill_min": round(min(fills), 4),
        "imbalance": round(statistics.mean(imbalances), 3),
    }


def measure_groups(groups: int, members: int, prompt: int, rows: int, token_budget: int) -> dict[str, float]:
    """Pack groups of `members` completions of one prompt each, with shared prefixes and without."""
    random = np.random.default_rng(0)
    names = [group for group in range(groups) for _ in range(members)]
    lengths = np.clip(lognormal_lengths(len(names), 0), 16, token_budget - prompt)
    prompts = random.integers(0, 150_000, (groups, prompt))
    sequences = [
        np.concatenate([prompts[group], random.integers(0, 150_000, length)])
        for group, length in zip(names, lengths, strict=True)
    ]
    started = time.process_time()
    shared, _ = pack_groups(sequences, names, rows=rows, token_budget=token_budget)
    seconds = time.process_time() - started
    apart, _ = pack_groups(sequences, None, rows=rows, token_budget=token_budget)
    return {
        "groups": groups,
        "members": members,
        "prompt_tokens": prompt,
        "milliseconds": round(seconds * 1e3, 2),
        "micro_batches": len(shared.micro_batches),
        "micro_batches_apart": len(apart.micro_batches),
    }


def main() -> None:
    """Measure a large step, a usual one and one of a single micro-batch; then groups with prompts of three lengths."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    for count, rows, token_budget in [(8192, 8, 32768), (512, 8, 32768), (128, 8, 65536)]:
        print(json.dumps(measure(count, rows, token_budget, repeats)))
    for prompt in (100, 1000, 4000):
        print(json.dumps(measure_groups(1024, 8, prompt, 8, 32768)))


if __name__ == "__main__":
    main()
