"""The fused log-probs against the plain way: time, peak memory and largest difference, forward and backward.

The plain way computes the logits of the whole vocabulary in float32, then log-softmax and gather.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

import torch

from grpo_core.objective.logprobs import token_logprobs

CASES = ((1024, 256, 32000), (4096, 256, 150000))


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = hidden.float() @ weight.float().T
    return torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]


def fused(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return token_logprobs(hidden, weight, targets)[0]


def measure_one(way: str, tokens: int, width: int, vocabulary: int) -> dict[str, float]:
    """One forward and backward pass in this process; the peak is that of the whole process, less its start."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = (torch.randn(vocabulary, width) / width**0.5).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,))
    # The weight's gradient belongs to both ways and is not what is compared.
    weight.grad = torch.zeros_like(weight)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    {"plain": plain, "fused": fused}[way](hidden, weight, targets).sum().backward()
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "mebibytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024}


def measure() -> list[dict[str, float | str]]:
    """Each way in a process of its own, because a peak never comes down again."""
    rows: list[dict[str, float | str]] = []
    for tokens, width, vocabulary in CASES:
        found = {}
        for way in ("plain", "fused"):
            arguments = [sys.executable, "-m", "benchmarks.logprobs", way, str(tokens), str(width), str(vocabulary)]
            seconds, mebibytes = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.split()
            found[way] = (float(seconds), float(mebibytes))
        case = f"log-probs, {tokens} tokens × {vocabulary} words"
        rows.append({"case": f"{case}, time", "ours": found["fused"][0], "theirs": found["plain"][0], "unit": "s"})
        rows.append({"case": f"{case}, memory", "ours": found["fused"][1], "theirs": found["plain"][1], "unit": "MiB"})
    return rows


if __name__ == "__main__":
    way, *sizes = sys.argv[1:]
    result = measure_one(way, *map(int, sizes))
    print(result["seconds"], result["mebibytes"])
