"""The command line and environment of a local vLLM engine. Pure; starting and watching it is the pool's work.

The flags are those an exact asynchronous run needs: the token route, the control routes, log-probs after
temperature and truncation, no defaults from the model's own generation config, and our transfer plugin.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from grpo_core.config import ADAPTER_RANKS

SERVED_MODEL_NAME = "policy"
# Lets the trainer ask a worker how far it is with fetching weights from the store.
STAGING_EXTENSION = "grpo_core.refit.store_worker.StagingExtension"
# Adapters that one engine step may mix: the newest and those that long requests still name.
MOST_ADAPTERS = 4


class LaunchError(ValueError):
    """An engine that cannot be started as described."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One local engine. `cpu_threads` is vLLM's binding (`0-3`, `0-3|4-7` per rank, `nobind`); `gpus` are indices.

    `kv_cache_bytes` is required on CPU, where the engine would otherwise take a share of the whole memory and a
    second engine would fail; on GPU None leaves the choice to `gpu_memory_utilization`. Two engines need two
    seeds: unseeded draws of engines with one seed are the same.
    `lora_rank`: the engine can load adapters up to that rank.
    """

    model: str
    host: str
    port: int
    device: Literal["cpu", "cuda"]
    dtype: str
    seed: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    tensor_parallel_size: int
    transfer: str
    block_size: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    cpu_threads: str = "nobind"
    gpus: tuple[int, ...] = ()
    enforce_eager: bool = True
    lora_rank: int | None = None
    extra_arguments: tuple[str, ...] = ()
    extra_environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """What to start. The environment may hold the API key: do not print it."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]


def engine_command(
    spec: EngineSpec, base_environment: Mapping[str, str], python: str = sys.executable
) -> EngineCommand:
    """The command for `spec`, on top of `base_environment`. Raises LaunchError for a spec that cannot work."""
    _check(spec)
    return EngineCommand(tuple(_arguments(spec, python)), {**base_environment, **_environment(spec, base_environment)})


def _check(spec: EngineSpec) -> None:
    if spec.device == "cpu" and spec.kv_cache_bytes is None:
        raise LaunchError(f"the CPU engine on port {spec.port} needs kv_cache_bytes; give it for example 268435456")
    if spec.device == "cpu" and spec.block_size is not None and spec.block_size % 32:
        raise LaunchError(f"block_size {spec.block_size} is not a multiple of 32, which the CPU engine needs")
    if spec.device == "cpu" and spec.max_num_batched_tokens < spec.max_model_len:
        raise LaunchError(
            f"max_num_batched_tokens {spec.max_num_batched_tokens} is below max_model_len {spec.max_model_len}, "
            "but the CPU engine reads every prompt in one step"
        )
    if spec.device == "cuda" and spec.gpus and len(spec.gpus) != spec.tensor_parallel_size:
        raise LaunchError(f"gpus {spec.gpus} do not match tensor_parallel_size {spec.tensor_parallel_size}")
    if spec.lora_rank is not None and spec.lora_rank > ADAPTER_RANKS[-1]:
        raise LaunchError(
            f"lora_rank {spec.lora_rank} is above {ADAPTER_RANKS[-1]}, the most that engines have room for"
        )


def _arguments(spec: EngineSpec, python: str) -> list[str]:
    # The module, not `vllm serve`: the CPU wheel's distribution name makes that command fail.
    arguments = [python, "-m", "vllm.entrypoints.openai.api_server"]
    arguments += ["--model", spec.model, "--served-model-name", SERVED_MODEL_NAME]
    arguments += ["--host", spec.host, "--port", str(spec.port), "--seed", str(spec.seed), "--dtype", spec.dtype]
    arguments += ["--max-model-len", str(spec.max_model_len), "--max-num-seqs", str(spec.max_num_seqs)]
    arguments += ["--max-num-batched-tokens", str(spec.max_num_batched_tokens)]
    if spec.device == "cpu":
        # A seeded request whose prompt is read in two steps kills the CPU engine: it rewinds the request's random
        # generator, which generators on the CPU cannot do. Refits that clear the cache make such prompts.
        arguments.append("--no-enable-chunked-prefill")
    arguments += ["--tensor-parallel-size", str(spec.tensor_parallel_size)]
    arguments += ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
    # A canary does not wait behind the requests that wait; requests among themselves keep their order.
    arguments += ["--scheduling-policy", "priority"]
    arguments += ["--enable-scale-out", "--disable-uvicorn-access-log"]
    arguments += ["--weight-transfer-config", json.dumps({"backend": spec.transfer})]
    if spec.transfer == "store":
        arguments += ["--worker-extension-cls", STAGING_EXTENSION]
    if spec.lora_rank is not None:
        room = next(rank for rank in ADAPTER_RANKS if rank >= spec.lora_rank)
        arguments += ["--enable-lora", "--max-lora-rank", str(room), "--max-loras", str(MOST_ADAPTERS)]
    if spec.block_size is not None:
        arguments += ["--block-size", str(spec.block_size)]
    if spec.kv_cache_bytes is not None:
        arguments += ["--kv-cache-memory-bytes", str(spec.kv_cache_bytes)]
    if spec.gpu_memory_utilization is not None:
        arguments += ["--gpu-memory-utilization", str(spec.gpu_memory_utilization)]
    if spec.enforce_eager:
        arguments.append("--enforce-eager")
    return [*arguments, "--skip-tokenizer-init", *spec.extra_arguments]


def _environment(spec: EngineSpec, base: Mapping[str, str]) -> dict[str, str]:
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if "VLLM_PLUGINS" in base:
        plugins = [name for name in base["VLLM_PLUGINS"].split(",") if name]
        environment["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*plugins, "forebay"]))
    if spec.device == "cpu":
        environment["VLLM_CPU_OMP_THREADS_BIND"] = spec.cpu_threads
        if spec.enforce_eager:
            # Otherwise the first request with log-probs compiles a helper with g++, for up to half a minute.
            environment["TORCHDYNAMO_DISABLE"] = "1"
    elif spec.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in spec.gpus)
    if spec.transfer == "ipc":
        # The handles of shared GPU memory travel as a pickle; only a loopback engine may accept that.
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if spec.lora_rank is not None:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    return {**environment, **dict(spec.extra_environment)}
