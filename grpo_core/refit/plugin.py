"""The `vllm.general_plugins` entry point: it makes vLLM know the weight transfer backend `gloo`.

vLLM calls `register` in each of its processes, possibly more than once, and an exception here aborts the
engine's start-up; so registration is idempotent, and imports nothing heavy until the backend is used.
"""

from __future__ import annotations

BACKEND = "gloo"


def register() -> None:
    """Register the worker side of the gloo transfer, once per process."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "grpo_core.refit.gloo_worker", "GlooWorkerEngine")
