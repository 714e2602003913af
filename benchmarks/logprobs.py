"""The fused log-probs against two other ways: time and peak memory, forward and backward.

    plain   the logits of the whole vocabulary, at least in float32, then log-softmax and gather
    tiled   the formula of TRL's fused output head where there is no Triton: tiles of 4096 × 32768 logits, a running
            log-sum-exp, tiles computed again in the backward pass

The weights and their gradient belong to all ways and are not counted. Time is the processor's.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor

from grpo_core.objective.logprobs import token_logprobs

CASES = ((1024, 256, 32000), (4096, 256, 150000))
TILE_TOKENS, TILE_WORDS = 4096, 32768


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logits = hidden.to(wide) @ weight.to(wide).T
    return torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]


def fused(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return token_logprobs(hidden, weight, targets)[0]


class _Tiled(torch.autograd.Function):
    """Log-prob and entropy; no gradient comes for the entropy, and none is computed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        maximum = torch.full((len(hidden),), -torch.inf)
        mass, weighted, chosen = (torch.zeros(len(hidden)) for _ in range(3))
        for rows, start, logits in _tiles(hidden, weight):
            higher = torch.maximum(maximum[rows], logits.amax(-1))
            rescale = torch.exp(maximum[rows] - higher)
            part = torch.exp(logits - higher[:, None])
            mass[rows] = mass[rows] * rescale + part.sum(-1)
            weighted[rows] = weighted[rows] * rescale + (part * logits).sum(-1)
            maximum[rows] = higher
            place = targets[rows] - start
            inside = (place >= 0) & (place < logits.shape[1])
            found = logits.gather(-1, place.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
            chosen[rows] = torch.where(inside, found, chosen[rows])
        normaliser = maximum + mass.log()
        ctx.save_for_backward(hidden, weight, targets, normaliser)
        ctx.set_materialize_grads(False)
        return chosen - normaliser, normaliser - weighted / mass

    @staticmethod
    def backward(ctx: Any, for_logprobs: Tensor, _: None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normaliser = ctx.saved_tensors
        for_hidden, for_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for rows, start, logits in _tiles(hidden, weight):
            p = torch.exp(logits - normaliser[rows, None])
            columns = slice(start, start + logits.shape[1])
            target = torch.arange(columns.start, columns.stop) == targets[rows, None]
            gradient = for_logprobs[rows, None] * (target.float() - p)
            for_hidden[rows] += gradient @ weight[columns]
            for_weight[columns] += gradient.T @ hidden[rows]
        return for_hidden, for_weight, None


def _tiles(hidden: Tensor, weight: Tensor) -> Any:
    for first in range(0, len(hidden), TILE_TOKENS):
        rows = slice(first, first + TILE_TOKENS)
        for start in range(0, len(weight), TILE_WORDS):
            yield rows, start, hidden[rows] @ weight[start : start + TILE_WORDS].T


def tiled(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logprobs: Tensor = _Tiled.apply(hidden, weight, targets)[0]  # type: ignore[no-untyped-call]
    return logprobs


WAYS = {"plain": plain, "tiled": tiled, "fused": fused}


def measure_one(way: str, tokens: int, width: int, vocabulary: int) -> tuple[float, float]:
    """(seconds, MiB) of one forward and backward pass in this process; the peak is the process's, less its start."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = (torch.randn(vocabulary, width) / width**0.5).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,))
    # What autograd adds the weight's gradient to; the gradient itself is taken off below.
    weight.grad = torch.zeros_like(weight)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    WAYS[way](hidden, weight, targets).sum().backward()  # type: ignore[no-untyped-call]
    seconds = time.process_time() - began
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return seconds, peak - weight.numel() * weight.element_size() / 2**20


def measure() -> list[dict[str, float | str]]:
    """Each way in a process of its own, because a peak never comes down again."""
    rows: list[dict[str, float | str]] = []
    for sizes in CASES:
        found = {}
        for way in WAYS:
            arguments = [sys.executable, "-m", "benchmarks.logprobs", way, *map(str, sizes)]
            seconds, mebibytes = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.split()
            found[way] = (float(seconds), float(mebibytes))
        for other in ("plain", "tiled"):
            case = f"log-probs, {sizes[0]} tokens × {sizes[2]} words, {other}"
            for place, what, unit in ((0, "time", "s"), (1, "memory", "MiB")):
                ours, theirs = found["fused"][place], found[other][place]
                rows.append({"case": f"{case}, {what}", "ours": ours, "theirs": theirs, "unit": unit})
    return rows


if __name__ == "__main__":
    way, *numbers = sys.argv[1:]
    print(*measure_one(way, *map(int, numbers)))
