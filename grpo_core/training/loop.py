"""Every rank's side of the training loop: carry out rank 0's commands, in step.

A command is a collective. Rank 0 draws it from the conductor, all ranks carry it out, and rank 0 hands the result
back. An exception on any rank ends the group: torchrun takes the others down, and the flow starts a new attempt. A
checkpoint is written while later commands are carried out; whatever goes wrong with it is raised here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from grpo_core.config import RunConfig
from grpo_core.refit.adapters import Adapter, Base, engines_without_base, refit_adapter
from grpo_core.refit.backends import adapter_directory
from grpo_core.refit.canary import Canary
from grpo_core.refit.coordinator import RefitFailed, RefitResult, RefitSettings, refit_weights
from grpo_core.refit.transfer import Transfer
from grpo_core.training.attention import Packing
from grpo_core.training.commands import Command, Commands, Idle, Refit, Save, Step
from grpo_core.training.feed import PartCache
from grpo_core.training.lora import gather_adapters, gather_base, gather_merged
from grpo_core.training.model import Policy
from grpo_core.training.reference import Reference
from grpo_core.training.saving import Saving
from grpo_core.training.step import StepResult, run_step
from storage.attempts import Fence
from storage.objects import ObjectStore


@dataclass(frozen=True, slots=True)
class Rank:
    """What one rank works with. `canary` is the text on which engines must agree with us; `transfer` is None on all
    ranks but 0."""

    config: RunConfig
    store: ObjectStore
    attempt: int
    policy: Policy
    optimizer: torch.optim.Optimizer
    cache: PartCache
    canary: tuple[int, ...]
    device: torch.device
    transfer: Transfer | None
    reference: Reference | None = None


def follow(rank: Rank, commands: Commands | None) -> None:
    """Carry out commands until rank 0 has no more. `commands` is given on rank 0 only."""
    result: Any = None
    with Saving(rank.config, rank.store, rank.attempt, rank.policy, rank.optimizer, rank.device) as saving:
        while True:
            saving.check()
            shared: list[Any] = [_next(commands, result) if commands is not None else None]
            dist.broadcast_object_list(shared, src=0)
            if shared[0] is None:
                return
            result = _carry_out(rank, shared[0], saving)


def _carry_out(rank: Rank, command: Command, saving: Saving) -> Any:
    match command:
        case Idle():
            return None
        case Step(plan):
            result = run_step(
                plan,
                rank.policy,
                rank.optimizer,
                rank.cache.rows,
                rank.config.objective,
                max_grad_norm=rank.config.optimizer.max_grad_norm,
                device=rank.device,
                reference=rank.reference,
                router_coefficient=rank.config.model.router_aux_loss_coefficient,
            )
            if dist.get_rank() != 0:
                rank.cache.keep(place.part for place in plan.places)
            return _with_all_logprobs(result)
        case Refit():
            return _refit(rank, command)
        case Save():
            return saving.start(command)


def _next(commands: Commands, result: Any) -> Any:
    try:
        return commands.send(result)
    except StopIteration:
        return None


def _with_all_logprobs(result: StepResult) -> StepResult:
    """Rank 0 writes the ledger, so it needs the log-probs of all ranks' rows."""
    if dist.get_world_size() == 1:
        return result
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, result.logprobs)
    return replace(result, logprobs={index: values for part in gathered for index, values in part.items()})


def _refit(rank: Rank, command: Refit) -> RefitResult | RefitFailed | None:
    """Gather on every rank, then move on rank 0. A failure of all engines is a result: the pool may recover."""
    if rank.config.refit.adapter_only:
        return _refit_adapter(rank, command)
    tensors = gather_merged(rank.policy.language_model, **_wire(rank), keep=dist.get_rank() == 0)
    canary = _canary(rank)
    if rank.transfer is None:
        return None
    try:
        return refit_weights(
            tensors,
            command.engines,
            command.stamp,
            rank.transfer,
            refit_settings(rank.config),
            canary=canary,
            fence=Fence(rank.store, rank.attempt).check,
        )
    except RefitFailed as failure:
        return failure


def _refit_adapter(rank: Rank, command: Refit) -> RefitResult | RefitFailed | None:
    """The same with adapters alone. Engines that lack the base are given it first, which every rank has to know of."""
    config, first, settings = rank.config, dist.get_rank() == 0, refit_settings(rank.config)
    lora = config.model.lora
    assert lora is not None
    shared: list[Any] = [None]
    if first:
        shared = [engines_without_base(command.engines, command.stamp.attempt, settings.start_seconds)]
    dist.broadcast_object_list(shared, src=0)
    model, lacking = rank.policy.language_model, shared[0]
    tensors = gather_base(model, **_wire(rank), keep=first) if lacking else []
    layers = gather_adapters(model, dtype=getattr(torch, config.wire_dtype), device="cpu", keep=first)
    canary = _canary(rank)
    if rank.transfer is None:
        return None
    try:
        return refit_adapter(
            Adapter(layers, lora.rank, lora.alpha, base_model=str(model.name_or_path)),
            command.engines,
            command.stamp,
            adapter_directory(config, rank.store),
            settings,
            canary=canary,
            base=Base(tensors, lacking, rank.transfer),
            fence=Fence(rank.store, rank.attempt).check,
        )
    except RefitFailed as failure:
        return failure


def _wire(rank: Rank) -> dict[str, Any]:
    """In what and where whole weights are gathered for their way to the engines."""
    on_gpu = rank.config.refit.backend in ("nccl", "ipc")
    return {
        "dtype": getattr(torch, rank.config.wire_dtype),
        "device": rank.device if on_gpu else torch.device("cpu"),
    }


def refit_settings(config: RunConfig) -> RefitSettings:
    """How this run refits. Only the workers of our gloo transfer check digests; for others they would be wasted."""
    control, transfer = config.refit.control_timeout_seconds, config.refit.transfer_timeout_seconds
    in_flight = config.grpo.async_grpo.in_flight_weight_updates
    return RefitSettings(
        connect_seconds=transfer,
        # Draining takes as long as the longest request may.
        pause_seconds=control if in_flight else config.generation.request_timeout_seconds,
        start_seconds=control,
        transfer_seconds=transfer,
        finish_seconds=control,
        resume_seconds=control,
        canary_seconds=control,
        pause_mode="keep" if in_flight else "wait",
        clear_cache=config.grpo.async_grpo.recompute_kv_cache_after_weight_updates,
        digests=config.refit.backend == "gloo",
    )


def _canary(rank: Rank) -> Canary:
    """The trainer's own log-probs of the canary text; a forward pass of all ranks."""
    tokens = rank.canary
    ids = torch.tensor([tokens], device=rank.device)
    positions = torch.arange(len(tokens), device=rank.device)
    with torch.no_grad():
        packing = Packing.of([len(tokens)], rank.device)
        logprobs = rank.policy(
            ids, positions.unsqueeze(0), packing, at=positions[:-1], targets=ids[0, 1:], temperature=1.0
        ).logprobs
    # Without a backward pass the root's parameters would stay gathered and be mistaken for the shards.
    rank.policy.reshard()  # type: ignore[operator]
    return Canary(tokens, tuple(logprobs.float().cpu().tolist()), rank.config.canary_tolerance)
