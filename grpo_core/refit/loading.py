"""Loading a complete set of weights into vLLM's model. Imported only inside vLLM's worker processes.

vLLM rebuilds the model layer by layer from what it is given and finishes a layer from uninitialised memory when a part
is missing; so whoever calls `load` has checked that the weights are complete and intact.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform


def load(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Open the model for loading and load it; from here to `finish` no forward pass may run."""
    _forget_kernels_of_experts(model)
    initialize_layerwise_reload(model)
    model.load_weights(iter(weights))


def finish(model: Any, model_config: Any) -> None:
    finalize_layerwise_reload(model, model_config)


def _forget_kernels_of_experts(model: Any) -> None:
    """On CPUs vLLM 0.32 packs the experts of a layer only when it first makes the kernel that multiplies them; without
    this, a later load would leave them as they came, and the kernel would read them as if they were packed."""
    for module in model.modules() if current_platform.is_cpu() else ():
        method = getattr(module, "quant_method", None)
        if method is not None and hasattr(method, "moe_kernel"):
            method.moe_kernel = None


def checkpoint_directory(model_config: Any) -> Path:
    """Directory of the checkpoint an engine was started from, in the hub's cache when it has a hub name."""
    if Path(model_config.model).is_dir():
        return Path(model_config.model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model_config.model, revision=model_config.revision, local_files_only=True))
