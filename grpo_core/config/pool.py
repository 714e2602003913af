"""The engines of a run: started by it, or somebody else's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from grpo_core.config.section import PositiveInt, Section

# Hosts that nobody outside this machine can reach.
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# What the flow itself says to the engines it starts: other keys decide it, or the run is wrong without it.
FLOW_ARGUMENTS = frozenset(
    {
        "--block-size",
        "--disable-uvicorn-access-log",
        "--dtype",
        "--enable-lora",
        "--enable-scale-out",
        "--enforce-eager",
        "--generation-config",
        "--gpu-memory-utilization",
        "--host",
        "--kv-cache-memory-bytes",
        "--logprobs-mode",
        "--max-lora-rank",
        "--max-loras",
        "--max-model-len",
        "--max-num-batched-tokens",
        "--max-num-seqs",
        "--model",
        "--no-enable-chunked-prefill",
        "--port",
        "--scheduling-policy",
        "--seed",
        "--served-model-name",
        "--skip-tokenizer-init",
        "--tensor-parallel-size",
        "--weight-transfer-config",
        "--worker-extension-cls",
    }
)


class LocalPool(Section):
    """Engines started and supervised by the flow."""

    kind: Literal["local"] = "local"
    engines: PositiveInt = Field(1, description="Number of engines")
    host: str = Field(
        "127.0.0.1", description="The control routes are not authenticated: leave loopback only on a network you trust"
    )
    port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port of the first engine, the others have the next ones; 0: free ports. An engine that is started again gets a free one",
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="What the engines compute on")
    gpus: tuple[tuple[int, ...], ...] = Field(
        (),
        description="device=cuda: GPU numbers of each engine, tensor_parallel_size of them; empty: those that are visible to the flow, for one engine alone",
    )
    threads: PositiveInt = Field(1, description="device=cpu: threads of each of an engine's workers")
    tensor_parallel_size: PositiveInt = Field(1, description="GPUs that share one engine's layers")
    max_num_seqs: PositiveInt = Field(64, description="Sequences of one engine step; more requests wait in the engine")
    max_num_batched_tokens: PositiveInt = Field(
        8192, description="Tokens of one engine step; raised to model.context_length where that is more"
    )
    kv_cache_bytes: PositiveInt | None = Field(None, description="Default: the engine's own choice")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="Share of the GPU's memory that an engine takes")
    enforce_eager: bool = Field(False, description="Run without CUDA graphs: a faster start, slower tokens")
    extra_arguments: tuple[str, ...] = Field(
        (), description="More arguments of `vllm serve`, but for those that the flow gives it"
    )
    start_timeout_seconds: float = Field(
        600,
        gt=0,
        le=1e9,
        description="Longest time for an engine to start, after which it is killed and started again, and for a request to wait while no engine serves",
    )
    health_timeout_seconds: float = Field(
        60, gt=0, le=1e9, description="An engine that is silent for longer is killed and started again"
    )
    max_restarts: int = Field(
        3,
        ge=0,
        le=2**53,
        description="Times one engine is started again without an hour of service in between; after that the run goes on without it, and fails when it was the last",
    )
    python: Path | None = Field(None, description="Interpreter of the engines, for an environment of its own")

    @property
    def longest_outage_seconds(self) -> float:
        """How long no engine may serve before the pool itself has failed."""
        return (1 + self.max_restarts) * self.start_timeout_seconds

    @model_validator(mode="after")
    def _one_set_each(self) -> LocalPool:
        if self.gpus and len(self.gpus) != self.engines:
            raise ValueError(
                f"pool.gpus names {len(self.gpus)} sets for pool.engines={self.engines}; give one set for each engine"
            )
        every = [gpu for gpus in self.gpus for gpu in gpus]
        if twice := sorted({gpu for gpu in every if every.count(gpu) > 1}):
            raise ValueError(f"pool.gpus names GPU {twice[0]} more than once; give each engine GPUs of its own")
        for gpus in self.gpus:
            if len(gpus) != self.tensor_parallel_size:
                raise ValueError(
                    f"pool.gpus gives an engine {list(gpus)}, which are not pool.tensor_parallel_size={self.tensor_parallel_size}; give each so many"
                )
        if self.device == "cuda" and self.engines > 1 and not self.gpus:
            raise ValueError(
                f"pool.engines={self.engines} on cuda would all start on the same GPUs; give each its own in pool.gpus, such as [[0], [1]]"
            )
        return self

    @model_validator(mode="after")
    def _arguments_are_its_own(self) -> LocalPool:
        for argument in self.extra_arguments:
            name = argument.partition("=")[0].replace("_", "-")
            if name in FLOW_ARGUMENTS:
                raise ValueError(
                    f"pool.extra_arguments names {argument}, which the flow gives every engine itself; remove it and set the key of the recipe that decides it"
                )
        return self


class ExternalPool(Section):
    """Engines that somebody else runs."""

    kind: Literal["external"] = "external"
    urls: tuple[Annotated[str, Field(pattern=r"^https?://")], ...] = Field(
        min_length=1,
        description="Addresses of the engines; the key of their generation routes is VLLM_API_KEY of the environment",
    )
    start_timeout_seconds: float = Field(
        600,
        gt=0,
        le=1e9,
        description="Longest time for an engine to answer, and for a request to wait while none serves",
    )
    health_timeout_seconds: float = Field(
        60,
        gt=0,
        le=1e9,
        description="An engine that is silent for longer leaves the pool until it has answered for a while, longer after each time",
    )

    @property
    def longest_outage_seconds(self) -> float:
        """How long no engine may serve before the pool itself has failed."""
        return self.start_timeout_seconds

    @model_validator(mode="after")
    def _each_once(self) -> ExternalPool:
        urls = [url.rstrip("/") for url in self.urls]
        for url in urls:
            if urls.count(url) > 1:
                raise ValueError(f"pool.urls names {url} more than once; an engine is in the pool once")
        return self
