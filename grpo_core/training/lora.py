"""Low-rank adapters: only they are trained, and the weights they amount to are what leaves the trainer.

Contract: adapters are put into the model in place, so that everything else sees the same model; they begin as zero
(Hu et al. 2021) and are the same on every rank. Without adapters `gather_merged` and `gather_base` are
`refit.source.gather`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from grpo_core.refit.source import checkpoint_name, gather

if TYPE_CHECKING:
    from grpo_core.config import LoRAConfig

ADAPTER = "default"

Named = list[tuple[str, Tensor]]
# The factors of each adapted layer, by its name in the checkpoint: A [rank, inputs] and B [outputs, rank].
Layers = dict[str, tuple[Tensor, Tensor]]


def add_adapters(language_model: PreTrainedModel, settings: LoRAConfig, *, seed: int) -> None:
    """Freeze the model and give every chosen linear layer an adapter, drawn from `seed` alone."""
    # Imported late: it takes seconds, which a run without adapters need not spend.
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        target_modules=list(settings.target_modules) or "all-linear",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, language_model, adapter_name=ADAPTER)
    for name, parameter in language_model.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def is_adapter(name: str) -> bool:
    """Whether the parameter of this name is an adapter's."""
    return ".lora_A." in name or ".lora_B." in name


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The model as it was before adapters, for the time of the block."""
    layers = _adapted_layers(model)
    # PEFT's own switch would also freeze the adapters, which FSDP may already hold as trainable.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@torch.no_grad()
def gather_merged(model: nn.Module, *, dtype: torch.dtype, device: torch.device | str, keep: bool) -> Named:
    """All weights as if there were no adapters, each with what its adapter adds; otherwise as `refit.source.gather`.

    The sum is made in the precision of the master weights, then rounded to `dtype`.
    """
    adapted = {id(layer.base_layer.weight): layer for layer in _adapted_layers(model)}
    return _gather_adapted(model, adapted, dtype=dtype, device=device, keep=keep)


@torch.no_grad()
def gather_base(model: nn.Module, *, dtype: torch.dtype, device: torch.device | str, keep: bool) -> Named:
    """All weights but the adapters, as they are under them: those of version 0. Otherwise as `refit.source.gather`."""
    return _gather_adapted(model, {}, dtype=dtype, device=device, keep=keep)


def _gather_adapted(
    model: nn.Module, adapted: dict[int, Any], *, dtype: torch.dtype, device: torch.device | str, keep: bool
) -> Named:
    """The weights under their names in the checkpoint; `adapted` are the layers, by the identity of their weight, to which
    what their adapters add is added."""
    if not _adapted_layers(model):
        return gather(model, dtype=dtype, device=device, keep=keep)
    gathered: Named = []
    done: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if is_adapter(name):
            continue
        if id(parameter) not in done:
            full = _whole(parameter)
            if id(parameter) in adapted:
                full = full + _difference(adapted[id(parameter)])
            full = full.to(device=device, dtype=dtype).contiguous() if keep else full.new_empty(0)
            done[id(parameter)] = full
        if keep:
            gathered.append((checkpoint_name(name).replace(".base_layer.", "."), done[id(parameter)]))
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
    return gathered


@torch.no_grad()
def gather_adapters(model: nn.Module, *, dtype: torch.dtype, device: torch.device | str, keep: bool) -> Layers:
    """The adapters alone; a collective. Ranks without `keep` get none."""
    gathered: Layers = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            a, b = (_whole(factor[ADAPTER].weight) for factor in (module.lora_A, module.lora_B))
            if keep:
                gathered[checkpoint_name(name)] = (_copy(a, dtype, device), _copy(b, dtype, device))
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
    return gathered


def _copy(tensor: Tensor, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    return tensor.to(device=device, dtype=dtype).contiguous()


def _adapted_layers(model: nn.Module) -> list[Any]:
    """The layers that PEFT has put an adapter into."""
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def _difference(layer: Any) -> Tensor:
    """What the adapter adds to its layer's weight: scale · B A."""
    product = _whole(layer.lora_B[ADAPTER].weight) @ _whole(layer.lora_A[ADAPTER].weight) * layer.scaling[ADAPTER]
    return product.T if layer.fan_in_fan_out else product


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
