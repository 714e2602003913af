"""One optimizer step from an explicit plan.

Invariant: loss and gradient do not depend on how rows were packed or spread over ranks, because every sum is divided
by the denominators of the whole step, which the plan carries. Each step uses its batch once, so the policy at the
start of the step is the current one and its log-probs need no second forward pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_core.config import ObjectiveConfig
from grpo_core.objective.losses import Denominators, policy_loss
from grpo_core.training.batch import Batch, Row
from grpo_core.training.model import Policy


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row is: the `row`-th of the part with this key."""

    part: str
    row: int


# One token that nothing was generated for: it keeps a rank busy that would otherwise have no row, and trains nothing.
FILLER = Place("filler", 0)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What every rank does in one step; plain data, so that rank 0 can send it to the others.

    micro_batches[m][r] lists the indices, into `places` and `advantages`, of rank r's rows in micro-batch m.
    """

    step: int
    places: list[Place]
    advantages: list[float]
    micro_batches: list[list[list[int]]]
    oldest_version: int
    denominators: Denominators
    learning_rate: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did, the same on every rank but `logprobs`: index into the plan's places → the trainer's log-probs
    of the row's generated tokens, for this rank's rows. `pairs`: metric → (numerator, denominator) over all ranks."""

    loss: float
    grad_norm: float
    pairs: dict[str, tuple[float, float]]
    seconds: float
    logprobs: dict[int, np.ndarray]


class NonFiniteStep(RuntimeError):
    """The loss or the gradient is not a number; the weights were left as they were."""


def run_step(
    plan: StepPlan,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    rows: Callable[[Sequence[Place]], list[Row]],
    objective: ObjectiveConfig,
    *,
    max_grad_norm: float,
    device: torch.device,
) -> StepResult:
    """Run `plan` on this rank; a collective of all ranks. Raise NonFiniteStep before the weights are touched."""
    began = time.monotonic()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    loss_sum = torch.zeros((), device=device)
    sums: dict[str, list[float | Tensor]] = {}
    logprobs: dict[int, np.ndarray] = {}
    for micro_batch in plan.micro_batches:
        indices = micro_batch[rank]
        batch = Batch.of(
            rows([plan.places[index] for index in indices]),
            [plan.advantages[index] for index in indices],
            oldest_version=plan.oldest_version,
            device=device,
        )
        current, entropy = policy(
            batch.input_ids, batch.position_ids, batch.packing, at=batch.at, targets=batch.targets
        )
        loss, metrics = policy_loss(
            current,
            current.detach(),
            batch.behaviour_logprobs,
            batch.advantages,
            batch.mask,
            batch.sequence_ids,
            objective,
            denominators=plan.denominators,
            entropy=entropy,
        )
        # FSDP averages gradients over ranks; the denominators are already those of all ranks.
        (loss * ranks).backward()
        loss_sum += loss.detach()
        for name, pair in metrics.items():
            held = sums.setdefault(name, [0.0, 0.0])
            for position in (0, 1):
                held[position] = held[position] + pair[position]
        split = np.bincount(batch.sequence_ids.cpu().numpy(), minlength=len(indices)).cumsum()[:-1]
        logprobs |= dict(zip(indices, np.split(current.detach().float().cpu().numpy(), split), strict=True))
    grad_norm = _float(torch.nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm))
    loss_value, pairs = _over_ranks(loss_sum, sums)
    if not (math.isfinite(loss_value) and math.isfinite(grad_norm)):
        optimizer.zero_grad(set_to_none=True)
        raise NonFiniteStep(
            f"step {plan.step}: loss {loss_value} and gradient norm {grad_norm} are not finite; lower optimizer.learning_rate"
        )
    for group in optimizer.param_groups:
        group["lr"] = plan.learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(loss_value, grad_norm, pairs, time.monotonic() - began, logprobs)


def _float(norm: Tensor) -> float:
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _over_ranks(loss: Tensor, sums: dict[str, list[float | Tensor]]) -> tuple[float, dict[str, tuple[float, float]]]:
    """Sum the loss and all metric pairs over ranks in one collective; every rank has the same metric names."""
    names = sorted(sums)
    flat = torch.tensor(
        [float(loss), *(float(value) for name in names for value in sums[name])],
        dtype=torch.float64,
        device=loss.device,
    )
    dist.all_reduce(flat)
    values = flat.tolist()
    return values[0], {name: (values[1 + 2 * i], values[2 + 2 * i]) for i, name in enumerate(names)}
