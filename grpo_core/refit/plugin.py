"""The `vllm.general_plugins` entry point: it makes vLLM know the weight transfer backends `gloo` and `store`.

vLLM calls `register` in each of its processes, possibly more than once, and an exception here aborts the
engine's start-up; so registration is idempotent, and imports nothing heavy until a backend is used.
"""

from __future__ import annotations

BACKENDS = {
    "gloo": ("grpo_core.refit.gloo_worker", "GlooWorkerEngine"),
    "store": ("grpo_core.refit.store_worker", "StoreWorkerEngine"),
}


def register() -> None:
    """Register the worker side of our transfers, once per process."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    for backend, (module, name) in BACKENDS.items():
        if backend not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(backend, module, name)
