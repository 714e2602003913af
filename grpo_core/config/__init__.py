"""The configuration of a run: every key, its bounds and its default, and the rules between keys.

Contract: this package is the only place that spells a default. Unknown keys are refused. What can be known to be
wrong without starting a process is refused here, so that `forebay validate` is the whole truth about a recipe.
Names follow NeMo RL and TRL where users know them from there. Imports neither torch nor vLLM.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from grpo_core.config.learning import (
    AsyncGRPOConfig,
    DataConfig,
    DirectoryModel,
    FileData,
    GenerationConfig,
    GRPOConfig,
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
    PackingConfig,
    ReasoningGymData,
    RewardFunction,
    RewardsConfig,
    SamplingConfig,
    SmolLM2Model,
    TinyModel,
    WarmStart,
)
from grpo_core.config.objective import ObjectiveConfig
from grpo_core.config.operation import (
    LOOPBACK,
    CheckpointingConfig,
    EvaluationConfig,
    ExternalPool,
    LocalPool,
    LoggingConfig,
    RefitConfig,
    StorageConfig,
    TrainingConfig,
)
from grpo_core.config.section import Section

__all__ = [
    "LOOPBACK",
    "AsyncGRPOConfig",
    "CheckpointingConfig",
    "DataConfig",
    "DirectoryModel",
    "EvaluationConfig",
    "ExternalPool",
    "FileData",
    "GRPOConfig",
    "GenerationConfig",
    "LoRAConfig",
    "LocalPool",
    "LoggingConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "PackingConfig",
    "ReasoningGymData",
    "RefitConfig",
    "RewardFunction",
    "RewardsConfig",
    "RunConfig",
    "SamplingConfig",
    "Section",
    "SmolLM2Model",
    "StorageConfig",
    "TinyModel",
    "TrainingConfig",
    "WarmStart",
]

RUN_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"


class RunConfig(Section):
    """One training run."""

    run_id: str = Field(
        "run", pattern=RUN_ID, description="Names everything the run writes; the same name continues the run"
    )
    seed: int = Field(0, ge=0, description="Seed of everything that is drawn, except the data")
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rewards: RewardsConfig = RewardsConfig()
    sampling: SamplingConfig = SamplingConfig()
    generation: GenerationConfig = GenerationConfig()
    grpo: GRPOConfig = GRPOConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    packing: PackingConfig = PackingConfig()
    training: TrainingConfig = TrainingConfig()
    refit: RefitConfig = RefitConfig()
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    storage: StorageConfig = StorageConfig()
    pool: Annotated[LocalPool | ExternalPool, Field(discriminator="kind", description="The engines")] = LocalPool()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _rules_between_sections(self) -> RunConfig:
        window, objective = self.grpo.async_grpo.max_trajectory_age_steps, self.objective
        if window > 0 and objective.importance_correction == "none" and not objective.acknowledge_no_correction:
            raise ValueError(
                f"grpo.async_grpo.max_trajectory_age_steps={window} trains on tokens of older policies, but objective.importance_correction is none; "
                "set it to token or sequence, or acknowledge with objective.acknowledge_no_correction=true"
            )
        if self.generation.max_completion_length >= self.model.context_length:
            raise ValueError(
                f"generation.max_completion_length={self.generation.max_completion_length} leaves no room for a prompt in "
                f"model.context_length={self.model.context_length}; lower it"
            )
        if self.packing.token_budget < self.model.context_length:
            raise ValueError(
                f"packing.token_budget={self.packing.token_budget} cannot hold one sequence of model.context_length={self.model.context_length}; raise it"
            )
        rows = self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt
        if rows < self.training.ranks * self.training.nodes:
            raise ValueError(
                f"a step has {rows} rollouts for {self.training.ranks * self.training.nodes} trainer ranks; raise grpo.num_prompts_per_step"
            )
        if self.training.step_timeout_seconds <= self.generation.lease_timeout_seconds:
            raise ValueError(
                f"training.step_timeout_seconds={self.training.step_timeout_seconds:g} calls the trainer stuck before a lost lease is leased "
                f"again after generation.lease_timeout_seconds={self.generation.lease_timeout_seconds:g}; raise the first or lower the second"
            )
        if fault := self._refit_fault():
            raise ValueError(fault)
        return self

    def _refit_fault(self) -> str | None:
        """Why the weights could not move from this trainer to these engines."""
        backend, training, pool = self.refit.backend, self.training, self.pool
        engines_on = pool.device if isinstance(pool, LocalPool) else None
        if backend == "gloo":
            if engines_on == "cuda":
                return "refit.backend=gloo serves engines on CPUs, but pool.device is cuda; use nccl or ipc"
            return None
        if training.device != "cuda":
            return f"refit.backend={backend} needs GPUs, but training.device is {training.device}; use gloo"
        if engines_on == "cpu":
            return f"refit.backend={backend} needs engines on GPUs, but pool.device is cpu; set it to cuda, or use gloo"
        if backend == "ipc":
            if training.nodes > 1:
                return "refit.backend=ipc shares one machine's GPU memory, but training.nodes is more than 1; use nccl"
            if training.ranks > 1:
                return (
                    f"refit.backend=ipc shares the memory of one GPU, but training.ranks is {training.ranks}; use nccl"
                )
            if not isinstance(pool, LocalPool):
                return "refit.backend=ipc shares one machine's GPU memory, but pool.kind is external; use nccl"
            if pool.host not in LOOPBACK:
                return (
                    f"refit.backend=ipc sends handles as pickles, which only engines on loopback may accept, but pool.host is {pool.host}; "
                    "set it to 127.0.0.1, or use nccl"
                )
        return None

    @property
    def lease_prompts(self) -> int:
        """Prompts of one lease: as configured, or a quarter of a step's."""
        return self.generation.lease_prompts or max(1, self.grpo.num_prompts_per_step // 4)
