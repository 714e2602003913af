"""The policy's weights as an engine wants them: full, unsharded, named and shaped as in a Hugging Face checkpoint.

In memory a model may hold them otherwise, all experts of a layer as one tensor for instance; transformers knows what
its loader did and undoes it when it saves, and so do these gathers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import groupby

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from transformers.core_model_loading import revert_weight_conversion

# Wrappers of activation checkpointing and torch.compile put these into parameter names.
WRAPPER_PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.")
LAYER = re.compile(r"(^|\.)layers\.\d+\.")

Named = list[tuple[str, Tensor]]


@torch.no_grad()
def gather(model: torch.nn.Module, *, dtype: torch.dtype, device: torch.device | str, keep: bool) -> Named:
    """All weights of `model` in `dtype` on `device`, in layer order, the output head included even when tied.

    A collective: every rank calls it, in step; only those with `keep` (rank 0) hold the result, the others get
    an empty list. When it returns, the gathers are complete, also on the device: a transfer that reads on
    another stream finds nothing pending. Tensors may share memory with the parameters, so the refit must end
    before the next optimizer step begins.
    """
    return gather_named(model, named_weights(model), whole, dtype=dtype, device=device, keep=keep)


def named_weights(model: torch.nn.Module) -> Named:
    """What a checkpoint of `model` holds, as it is in memory, without the traces of wrappers in the names: parameters,
    those that are tied under each of their names, and the buffers that are saved, such as a router's bias."""
    return [(checkpoint_name(name), value) for name, value in model.state_dict(keep_vars=True).items()]


@torch.no_grad()
def gather_named(
    model: torch.nn.Module,
    named: Named,
    full: Callable[[Tensor], Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    keep: bool,
) -> Named:
    """As `gather`, of some of `named_weights`, each as `full` makes it whole. Buffers keep their dtype."""
    gathered: Named = []
    uses = Counter(id(weight) for _, weight in named)
    done: dict[int, Tensor] = {}
    # A layer at a time, so that no more than one is there in both forms.
    for _, layer in groupby(named, key=lambda item: _layer(item[0])):
        values: dict[str, Tensor] = {}
        for name, weight in layer:
            value = done.get(id(weight))
            if value is None:
                value, wire = full(weight), dtype if isinstance(weight, Parameter) else weight.dtype
                value = value.to(device=device, dtype=wire).contiguous() if keep else value.new_empty(0)
                if uses[id(weight)] > 1:
                    done[id(weight)] = value
            values[name] = value
        if keep:
            gathered += revert_weight_conversion(model, values).items()  # type: ignore[arg-type]
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
    return gathered


def whole(weight: Tensor) -> Tensor:
    """The full tensor of a weight that may be sharded; a collective if it is."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight.detach()


def checkpoint_name(name: str) -> str:
    """The name of a weight, without the traces of wrappers."""
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def _layer(name: str) -> str:
    """The part of the name that says which layer it is in; empty outside of layers."""
    found = LAYER.search(name)
    return name[: found.end()] if found else ""
