"""Whether an engine that somebody else started can serve a run, by its own account of how it was started.

Contract: what would spoil a run without a word is refused before the engine joins. Log-probs before temperature pass
every check at temperature 1, the canary's too, and are wrong at any other. Pure.
"""

from collections.abc import Mapping
from typing import Any

from grpo_core.config import RunConfig


def fault_of(configuration: Any, config: RunConfig) -> str | None:
    """Why the engine that gave this answer to `/server_info` cannot serve the run,
    and how to start it; None if it can."""
    model = _section(configuration, "model_config")
    if model is None:
        return "does not say how it was started; run vLLM 0.32 or later with VLLM_SERVER_DEV_MODE=1"
    if model.get("logprobs_mode") != "processed_logprobs":
        return f"has --logprobs-mode {model.get('logprobs_mode')}; start it with processed_logprobs"
    if model.get("dtype") != f"torch.{config.model.dtype}":
        return f"computes in {model.get('dtype')}; start it with --dtype {config.model.dtype}, which is model.dtype"
    longest = model.get("max_model_len")
    if not isinstance(longest, int) or longest < config.model.context_length:
        return (
            f"has --max-model-len {longest}; start it with model.context_length={config.model.context_length} at least"
        )
    transfer = _section(configuration, "weight_transfer_config") or {}
    if transfer.get("backend") != config.refit.backend:
        return (
            f"receives weights by {transfer.get('backend')}; start it with "
            f'--weight-transfer-config \'{{"backend": "{config.refit.backend}"}}\', which is refit.backend'
        )
    return _adapter_fault(configuration, config)


def _adapter_fault(configuration: Any, config: RunConfig) -> str | None:
    if config.model.lora is None or not config.refit.adapter_only:
        return None
    rank = (_section(configuration, "lora_config") or {}).get("max_lora_rank")
    if isinstance(rank, int) and rank >= config.model.lora.rank:
        return None
    return f"has room for adapters of rank {rank}; start it with --enable-lora and --max-lora-rank {config.model.lora.rank} at least"


def _section(configuration: Any, name: str) -> Mapping[str, Any] | None:
    whole = configuration.get("vllm_config") if isinstance(configuration, dict) else None
    section = whole.get(name) if isinstance(whole, dict) else None
    return section if isinstance(section, dict) else None
