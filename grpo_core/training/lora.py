"""Low-rank adapters: only they are trained, and the weights they amount to are what leaves the trainer.

Contract: adapters are put into the model in place, so that everything else sees the same model; they begin as zero
(Hu et al. 2021) and are the same on every rank. Without adapters `gather_merged` and `gather_base` are
`refit.source.gather`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_core.refit.source import Named, checkpoint_name, gather_named, named_weights, whole

if TYPE_CHECKING:
    from grpo_core.config import LoRAConfig

ADAPTER = "default"

# The factors of each adapted layer, by its name in the checkpoint: A [rank, inputs] and B [outputs, rank].
Layers = dict[str, tuple[Tensor, Tensor]]


class AdapterError(ValueError):
    """Adapters that the model cannot be given."""


def add_adapters(language_model: PreTrainedModel, settings: LoRAConfig, *, seed: int) -> None:
    """Freeze the model and give every chosen linear layer an adapter, drawn from `seed` alone. Raises AdapterError."""
    # Imported late: it takes seconds, which a run without adapters need not spend.
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        target_modules=[f"policy.{name}" for name in adapted_names(language_model, settings.target_modules)],
    )
    # PEFT must not see what kind of model it is: it would take layers for experts' tensors that are called alike.
    unknown = nn.ModuleDict({"policy": language_model})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, unknown, adapter_name=ADAPTER)
    for name, parameter in language_model.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def adapted_names(language_model: PreTrainedModel, targets: Collection[str]) -> list[str]:
    """Names of the linear layers that `targets` mean, by their full names or by how those end; all but the output head
    when there is none. Raises AdapterError.

    Experts that a model holds as one tensor are no linear layers and stay as they are.
    """
    head = language_model.get_output_embeddings()  # type: ignore[no-untyped-call]
    linear = [
        name for name, module in language_model.named_modules() if type(module) is nn.Linear and module is not head
    ]
    if not targets:
        return linear
    for target in targets:
        meant = [(name, module) for name, module in language_model.named_modules() if _is_meant(name, target)]
        others = [
            f"{name} is {'the output head' if module is head else f'no linear layer ({type(module).__name__})'}"
            for name, module in meant
            if name not in linear
        ]
        if others or not meant:
            reason = others[0] if others else f"the {language_model.config.model_type} model has no layer of that name"
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise AdapterError(f"model.lora.target_modules names {target}, but {reason}; name some of {known}")
    return [name for name in linear if any(_is_meant(name, target) for target in targets)]


def adapter_weights(model: nn.Module) -> int:
    """How many weights all adapters have together; 0 without."""
    return sum(parameter.numel() for name, parameter in model.named_parameters() if is_adapter(name))


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
    """The weights under their names in the checkpoint; `adapted` are the layers, by the identity of their weight, to
    which what their adapters add is added."""

    def full(weight: Tensor) -> Tensor:
        layer = adapted.get(id(weight))
        return whole(weight) if layer is None else whole(weight) + _difference(layer)

    base = [
        (name.replace(".base_layer.", "."), weight) for name, weight in named_weights(model) if not is_adapter(name)
    ]
    return gather_named(model, base, full, dtype=dtype, device=device, keep=keep)


@torch.no_grad()
def gather_adapters(model: nn.Module, *, dtype: torch.dtype, device: torch.device | str, keep: bool) -> Layers:
    """The adapters alone; a collective. Ranks without `keep` get none."""
    gathered: Layers = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            a, b = (whole(factor[ADAPTER].weight) for factor in (module.lora_A, module.lora_B))
            if keep:
                gathered[checkpoint_name(name)] = (_copy(a, dtype, device), _copy(b, dtype, device))
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
    return gathered


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Put into each adapted layer's weight what its adapter adds, and take the adapters out, in place. Not sharded."""
    for name, layer in [(name, module) for name, module in model.named_modules() if hasattr(module, "lora_A")]:
        layer.base_layer.weight += _difference(layer)
        model.set_submodule(name, layer.base_layer)


def _is_meant(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _copy(tensor: Tensor, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    return tensor.to(device=device, dtype=dtype).contiguous()


def _adapted_layers(model: nn.Module) -> list[Any]:
    """The layers that PEFT has put an adapter into."""
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def _difference(layer: Any) -> Tensor:
    """What the adapter adds to its layer's weight: scale · B A."""
    return whole(layer.lora_B[ADAPTER].weight) @ whole(layer.lora_A[ADAPTER].weight) * layer.scaling[ADAPTER]
