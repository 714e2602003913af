"""One step of the trainer from an explicit plan: one optimizer update, or several.

Invariants: loss and gradient do not depend on how rows were packed or spread over ranks, because every sum is divided
by the denominators of the whole step, which the plan carries; so a token weighs the same in whichever update it falls.
An update in which no token may be trained is not made. The old policy is the one at the start of the step. The first
update meets it as it is; only where the objective asks for it, the batches of later updates are scored once before,
without a gradient. Every rank asks for its own rows and no others.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_core.metrics import extreme_sign
from grpo_core.objective.diagnostics import RATIO_EXTREMES, merge_extremes, merge_sums
from grpo_core.objective.losses import Denominators, policy_loss
from grpo_core.objective.settings import ObjectiveSettings, needs_old_policy
from grpo_core.training.batch import Batch, Row
from grpo_core.training.experts import load_imbalance
from grpo_core.training.model import Policy, Scores, logprobs_of, scores_of
from grpo_core.training.reference import Reference

Pair = tuple[Tensor | float, Tensor | float]
# Among the sums of an update, until they become figures of their own.
LOSS, TOKENS = "step_loss", "step_tokens"
LARGEST = "micro_batch_tokens_max"


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

    micro_batches[m][r] lists the indices, into `places` and `advantages`, of rank r's rows in micro-batch m. `updates`
    are the numbers of micro-batches that the optimizer updates take, in order; empty: one update takes all. `groups`
    is the group of each place, among which prefixes are shared; empty: nothing is shared. `trained` says which places
    may have a gradient (empty: all), `positive` which belong to a rewarded rollout; `version` is the training version.
    """

    step: int
    places: list[Place]
    advantages: list[float]
    micro_batches: list[list[list[int]]]
    oldest_version: int
    denominators: Denominators
    learning_rate: float
    updates: tuple[int, ...] = ()
    groups: list[int] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    positive: list[bool] = field(default_factory=list)
    version: int | None = None

    def micro_batches_by_update(self) -> list[range]:
        """The numbers of the micro-batches of each update."""
        ends = np.cumsum(self.updates or (len(self.micro_batches),)).tolist()
        return [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did, the same on every rank but `logprobs`: index into the plan's places → the trainer's log-probs
    of the row's generated tokens when it first met them, for this rank's rows. `pairs`: metric → (numerator,
    denominator) over all ranks, `extremes`: metric → its value over all ranks. `grad_norm`: before clipping, mean of
    the updates made; 0 if none was. `updates`: how many were made. `phases`: parts of this rank's time, in seconds."""

    loss: float
    grad_norm: float
    pairs: dict[str, tuple[float, float]]
    seconds: float
    logprobs: dict[int, np.ndarray]
    updates: int = 1
    extremes: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)


class Stopwatch:
    """Seconds by phase. The clock does not wait for a GPU, so what is launched in one phase may end in another."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[name] += time.monotonic() - began


class NonFiniteStep(RuntimeError):
    """The loss or the gradient of an update is not a number; that update was not made."""


def run_step(
    plan: StepPlan,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    rows: Callable[[Sequence[Place]], list[Row]],
    objective: ObjectiveSettings,
    *,
    max_grad_norm: float,
    device: torch.device,
    reference: Reference | None = None,
    router_coefficient: float = 0.0,
) -> StepResult:
    """Run `plan` on this rank; a collective of all ranks. Raise NonFiniteStep before an update touches the weights.

    `reference` is there when the objective has a KL term; `router_coefficient` is the weight of the term that spreads
    tokens over experts.
    """
    began, watch = time.monotonic(), Stopwatch()
    rank, updates = dist.get_rank(), plan.micro_batches_by_update()

    def batch_of(number: int) -> Batch:
        return _batch(plan, plan.micro_batches[number][rank], rows, device)

    with watch.phase("logprob_seconds"):
        old = {number: logprobs_of(policy, batch_of(number)) for number in _scored_before(updates, objective)}
    extremes: dict[str, Tensor] = {}
    norms: list[float] = []
    totals: dict[str, Pair] = {}
    logprobs: dict[int, np.ndarray] = {}
    for update in updates:
        sums: dict[str, Pair] = {}
        for number in update:
            batch = batch_of(number)
            # With adapters the reference is the policy itself, so it is asked before a backward pass is due.
            with watch.phase("logprob_seconds"):
                anchor = None if reference is None else reference(batch)
            with watch.phase("forward_backward_seconds"):
                with watch.phase("forward_seconds"):
                    scores = scores_of(policy, batch)
                before = old.get(number, scores.logprobs.detach())
                loss, metrics = _loss(batch, scores, before, anchor, plan, objective, extremes)
                if router_coefficient:
                    balance, metrics["router_imbalance"] = _router_term(batch, scores, policy, plan.denominators)
                    loss = loss + router_coefficient * balance
                # FSDP averages gradients over ranks; the denominators are those of all ranks and all updates.
                (loss * (dist.get_world_size() * len(updates))).backward()
            merge_extremes(extremes, {LARGEST: torch.tensor(float(batch.input_ids.shape[1]))})
            metrics |= {LOSS: (loss.detach(), 1.0), TOKENS: (batch.mask.sum(), 1.0)}
            merge_sums(sums, metrics | {"prefix_tokens_saved": batch.saving()})
            logprobs |= dict(zip(plan.micro_batches[number][rank], batch.split(before), strict=True))
        sums = _over_ranks(sums, device)
        with watch.phase("optimizer_seconds"):
            norms += _update(plan, policy, optimizer, sums, max_grad_norm)
        merge_sums(totals, sums)
    loss_of_step, _ = totals.pop(LOSS), totals.pop(TOKENS)
    pairs = {name: (float(top), float(bottom)) for name, (top, bottom) in totals.items()}
    most, norm = _extremes_over_ranks(extremes, device), sum(norms) / max(len(norms), 1)
    seconds, phases = time.monotonic() - began, dict(watch.seconds)
    return StepResult(float(loss_of_step[0]), norm, pairs, seconds, logprobs, len(norms), most, phases)


def _scored_before(updates: Sequence[range], objective: ObjectiveSettings) -> list[int]:
    """The micro-batches whose old log-probs must be known before the first update: those that meet a changed policy."""
    return [number for update in updates[1:] for number in update] if needs_old_policy(objective) else []


def _batch(
    plan: StepPlan, indices: Sequence[int], rows: Callable[[Sequence[Place]], list[Row]], device: torch.device
) -> Batch:
    """The micro-batch of these places of the plan."""
    return Batch.of(
        rows([plan.places[index] for index in indices]),
        [plan.advantages[index] for index in indices],
        oldest_version=plan.oldest_version,
        device=device,
        groups=[plan.groups[index] for index in indices] if plan.groups else None,
        trained=[plan.trained[index] for index in indices] if plan.trained else None,
        positive=[plan.positive[index] for index in indices] if plan.positive else None,
    )


def _loss(
    batch: Batch,
    scores: Scores,
    old: Tensor,
    reference: Tensor | None,
    plan: StepPlan,
    objective: ObjectiveSettings,
    extremes: dict[str, Tensor],
) -> tuple[Tensor, dict[str, Pair]]:
    """This micro-batch's share of the step's loss, and its metrics; `extremes` takes up its own."""
    loss, metrics = policy_loss(
        scores.logprobs,
        old,
        batch.behaviour_logprobs,
        batch.advantages,
        batch.mask,
        batch.sequence_ids,
        objective,
        reference_logprobs=reference,
        # Without a bonus the entropy is only told, and its gradient would cost a pass over the vocabulary.
        entropy=scores.entropy if objective.entropy_coefficient else scores.entropy.detach(),
        lags=None if plan.version is None else plan.version - batch.versions,
        positive=batch.positive,
        denominators=plan.denominators,
        extremes=extremes,
    )
    return loss, dict(metrics)


def _router_term(batch: Batch, scores: Scores, policy: Policy, denominators: Denominators) -> tuple[Tensor, Pair]:
    """This micro-batch's share of the mean imbalance of the step's trained sequences, and the same as a metric."""
    imbalance = load_imbalance(
        scores.router_logits,
        batch.sequence_tokens,
        batch.sequence_lengths,
        experts_per_token=policy.language_model.config.num_experts_per_tok,
    )
    trained = torch.zeros_like(imbalance).index_add(0, batch.sequence_ids, batch.mask.to(imbalance.dtype)) > 0
    total = torch.where(trained, imbalance, 0.0).sum()
    return total / max(denominators.sequences, 1.0), (total.detach(), trained.sum())


def _update(
    plan: StepPlan, policy: Policy, optimizer: torch.optim.Optimizer, sums: Mapping[str, Pair], max_norm: float
) -> list[float]:
    """Clip the gradient, move the weights, forget the gradient; the norm before clipping. Nothing is done, and none
    told, where no token was trained: the gradient is 0 then, but momentum and weight decay would move the weights."""
    loss, tokens = (float(sums[name][0]) for name in (LOSS, TOKENS))
    if not tokens:
        optimizer.zero_grad(set_to_none=True)
        return []
    found = torch.nn.utils.clip_grad_norm_(policy.parameters(), max_norm)
    norm = float(found.full_tensor() if isinstance(found, DTensor) else found)
    if not (math.isfinite(loss) and math.isfinite(norm)):
        optimizer.zero_grad(set_to_none=True)
        raise NonFiniteStep(
            f"step {plan.step}: loss {loss} and gradient norm {norm} are not finite; lower optimizer.learning_rate"
        )
    for group in optimizer.param_groups:
        group["lr"] = plan.learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return [norm]


def _over_ranks(sums: Mapping[str, Pair], device: torch.device) -> dict[str, Pair]:
    """The sums over ranks, in one collective; every rank has the same metric names."""
    names = sorted(sums)
    flat = torch.stack(
        [torch.as_tensor(value, dtype=torch.float64, device=device) for name in names for value in sums[name]]
    )
    dist.all_reduce(flat)
    return {name: (top, bottom) for name, (top, bottom) in zip(names, flat.view(-1, 2).tolist(), strict=True)}


def _extremes_over_ranks(extremes: Mapping[str, Tensor], device: torch.device) -> dict[str, float]:
    """The extremes over ranks, in one collective; a rank that trained no token has none of the ratios'."""
    names = (*RATIO_EXTREMES, LARGEST)
    signed = [extreme_sign(name) * float(extremes[name]) if name in extremes else -math.inf for name in names]
    flat = torch.tensor(signed, dtype=torch.float64, device=device)
    dist.all_reduce(flat, op=dist.ReduceOp.MAX)
    return {
        name: extreme_sign(name) * value
        for name, value in zip(names, flat.tolist(), strict=True)
        if math.isfinite(value)
    }
