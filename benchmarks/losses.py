"""The loss of 256 sequences of 4096 tokens in one flat call, forward and backward, beside other ways.

    a loop   ours, each sequence by itself: its tokens chosen by its id, or cut out by their known lengths
    TRL      the formula of its asynchronous trainer, flat: clipped ratio, token mean, and its own metrics
    NeMo RL  the formulas of its clipped loss, flat: ratio, clip, truncated weights, and its own metrics

Ours computes the metrics of both in every case (but for TRL's two extremes), and is set to the loss it is compared
with. TRL has one loss, which is dapo here; NeMo RL has five of ours. dr_grpo and bnpo are dapo with another
denominator. The loop over lengths pays for nothing but calls: it finds its tokens for free, and the arithmetic, which
the flat call has as well, is most of what is left.
Values must agree, or there is no comparison. Time is the processor's, the least of several passes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from grpo_core.config import ObjectiveConfig
from grpo_core.objective.losses import Denominators, policy_loss

SEQUENCES, TOKENS = 256, 4096
EPSILON, CAP = 0.2, 2.0
PLAIN = ObjectiveConfig(importance_correction="none", acknowledge_no_correction=True, epsilon=EPSILON)
CORRECTED = ObjectiveConfig(importance_correction="token", importance_cap=CAP, epsilon=EPSILON)
NEMO_LOSSES = ("dapo", "grpo", "gspo", "cispo", "reinforce")
Inputs = dict[str, Tensor]
NAMES = ("logprobs", "old_logprobs", "behaviour_logprobs", "advantages", "mask", "sequence_ids")
Way = Callable[[Inputs], Tensor]


def draw(sequences: int, tokens: int) -> Inputs:
    """Log-probs of three policies that differ by a tenth of a nat, and advantages; all tokens are trained."""
    generator = torch.Generator().manual_seed(0)
    count = sequences * tokens
    old = -2 * torch.rand(count, generator=generator)
    ids = torch.repeat_interleave(torch.arange(sequences), tokens)
    return {
        "logprobs": (old + 0.1 * torch.randn(count, generator=generator)).requires_grad_(),
        "old_logprobs": old,
        "behaviour_logprobs": old + 0.1 * torch.randn(count, generator=generator),
        "advantages": torch.randn(sequences, generator=generator)[ids],
        "mask": torch.ones(count, dtype=torch.bool),
        "sequence_ids": ids,
    }


def ours(inputs: Inputs, config: ObjectiveConfig, denominators: Denominators | None = None) -> Tensor:
    logprobs, old, behaviour, advantages, mask, ids = (inputs[name] for name in NAMES)
    return policy_loss(logprobs, old, behaviour, advantages, mask, ids, config, denominators=denominators)[0]


def flat(config: ObjectiveConfig) -> Way:
    return lambda inputs: ours(inputs, config)


def by_id(inputs: Inputs) -> Tensor:
    ids = inputs["sequence_ids"]
    places = (torch.nonzero(ids == number)[:, 0] for number in range(int(ids[-1]) + 1))
    return _loop([{name: values[chosen] for name, values in inputs.items()} for chosen in places])


def by_length(inputs: Inputs) -> Tensor:
    lengths = torch.bincount(inputs["sequence_ids"]).tolist()
    parts = zip(*(inputs[name].split(lengths) for name in NAMES), strict=True)
    return _loop([dict(zip(NAMES, part, strict=True)) for part in parts])


def _loop(sequences: list[Inputs]) -> Tensor:
    step = Denominators(float(sum(len(one["mask"]) for one in sequences)), float(len(sequences)))
    return torch.stack([ours(one, CORRECTED, step) for one in sequences]).sum()


def trl(inputs: Inputs) -> Tensor:
    advantages, ids = inputs["advantages"], inputs["sequence_ids"]
    log_ratio = inputs["logprobs"] - inputs["old_logprobs"]
    ratio = torch.exp(log_ratio)
    clipped = torch.clamp(ratio, 1 - EPSILON, 1 + EPSILON)
    loss = -torch.min(ratio * advantages, clipped * advantages).sum() / len(ratio)
    with torch.no_grad():
        low = (ratio < 1 - EPSILON) & (advantages < 0)
        high = (ratio > 1 + EPSILON) & (advantages > 0)
        for values in (ratio, ratio - 1 - log_ratio, low.float(), high.float(), (low | high).float()):
            values.sum()
        # The share of clipped tokens of each completion, for the least and the largest of them.
        lengths, *held = (
            torch.zeros(int(ids.max()) + 1).index_add_(0, ids, values)
            for values in (torch.ones_like(ratio), low.float(), high.float())
        )
        _ = (held[0] / lengths).min(), (held[1] / lengths).max()
    return loss


def nemo(inputs: Inputs, loss_type: str = "dapo") -> Tensor:
    mask, advantages, ids = inputs["mask"].float(), inputs["advantages"], inputs["sequence_ids"]
    current, old, engine = inputs["logprobs"], inputs["old_logprobs"], inputs["behaviour_logprobs"]
    tokens = mask.sum() + 1e-8
    sequences = int(ids.max()) + 1

    def sequence_means(values: Tensor) -> Tensor:
        sums, counts = (torch.zeros(sequences).index_add(0, ids, part) for part in (values * mask, mask))
        return sums / (counts + 1e-8)

    log_ratio = current - old
    ratio = (sequence_means(log_ratio)[ids] if loss_type == "gspo" else log_ratio).exp()
    clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
    if loss_type == "cispo":
        surrogate = -advantages * clipped.detach() * current
    elif loss_type == "reinforce":
        surrogate = -advantages * current
    else:
        surrogate = torch.max(-advantages * ratio, -advantages * clipped)
    weight = torch.nan_to_num(torch.exp(old - engine), nan=0.0, posinf=0.0, neginf=0.0)
    truncated = torch.clamp(weight, min=0.0, max=CAP).detach()
    if loss_type in ("grpo", "gspo"):
        loss = sequence_means(truncated * surrogate).sum() / (sequences + 1e-8)
    else:
        loss = (truncated * surrogate * mask).sum() / tokens
    with torch.no_grad():
        x = old - engine
        average = torch.logaddexp(old, engine) - math.log(2)
        apart = [part - average for part in (old, engine)]
        figures = (
            x.abs().exp(),
            x.exp() - 1 - x,
            (-x).exp() - 1 + x,
            sum(part.exp() - 1 - part for part in apart) / 2,
            weight,
            -(current - engine).exp() * current,
            ratio,
            clipped,
            (weight > CAP).float(),
        )
        for values in figures:
            (values * mask).sum() / tokens
    return loss


def seconds(way: Way, inputs: Inputs, repeats: int) -> tuple[float, float]:
    """(least time of a forward and backward pass, value)."""
    least, value = math.inf, math.nan
    for _ in range(repeats):
        inputs["logprobs"].grad = None
        began = time.process_time()
        loss = way(inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        least, value = min(least, time.process_time() - began), float(loss.detach())
    return least, value


def measure(sequences: int = SEQUENCES, tokens: int = TOKENS) -> list[dict[str, float | str]]:
    """One row for each of the other ways."""
    inputs = draw(sequences, tokens)
    rows: list[dict[str, float | str]] = []
    ways: list[tuple[str, ObjectiveConfig, Way, int]] = [
        ("a loop over ids", CORRECTED, by_id, 1),
        ("a loop over slices", CORRECTED, by_length, 2),
        ("TRL", PLAIN, trl, 5),
    ]
    for loss_type in NEMO_LOSSES:
        config = CORRECTED.model_copy(update={"loss_type": loss_type})
        ways.append((f"NeMo RL {loss_type}", config, partial(nemo, loss_type=loss_type), 5))
    for name, config, other, repeats in ways:
        (mine, value), (theirs, other_value) = seconds(flat(config), inputs, 5), seconds(other, inputs, repeats)
        if not math.isclose(value, other_value, rel_tol=1e-3, abs_tol=1e-4):
            raise RuntimeError(
                f"the loss is {value} but {other_value} the way of {name}: they compute different things"
            )
        rows.append(
            {"case": f"loss of {sequences} × {tokens} tokens, {name}", "ours": mine, "theirs": theirs, "unit": "s"}
        )
    return rows


if __name__ == "__main__":
    for row in measure():
        print(f"{row['case']:50} {row['ours']:8.4f} {row['theirs']:8.4f} {row['ours'] / row['theirs']:6.2f}")  # type: ignore[operator]
