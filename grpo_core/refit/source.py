"""The policy's weights as an engine wants them: full, unsharded, in Hugging Face checkpoint names."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

# Wrappers of activation checkpointing and torch.compile put these into parameter names.
WRAPPER_PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.")


@torch.no_grad()
def gather(
    model: torch.nn.Module, *, dtype: torch.dtype, device: torch.device | str, keep: bool
) -> list[tuple[str, torch.Tensor]]:
    """All weights of `model` in `dtype` on `device`, in layer order, the output head included even when tied.

    A collective: every rank calls it, in step; only those with `keep` (rank 0) hold the result, the others get
    an empty list. When it returns, the gathers are complete, also on the device: a transfer that reads on
    another stream finds nothing pending. Tensors may share memory with the parameters, so the refit must end
    before the next optimizer step begins.
    """
    gathered: list[tuple[str, torch.Tensor]] = []
    done: dict[int, torch.Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        full = done.get(id(parameter))
        if full is None:
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
            full = full.to(device=device, dtype=dtype).contiguous() if keep else full.new_empty(0)
            done[id(parameter)] = full
        if keep:
            gathered.append((checkpoint_name(name), full))
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
    return gathered


def checkpoint_name(name: str) -> str:
    """The name a parameter has in a checkpoint, without the traces of wrappers."""
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name
