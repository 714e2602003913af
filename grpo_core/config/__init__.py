"""The configuration of a run: every key, its bounds and its default, and the rules between keys.

Contract: this package is the only place that spells a default. Unknown keys are refused. What can be known to be
wrong without starting a process is refused here, so that `forebay validate` is the whole truth about a recipe.
Names follow NeMo RL and TRL where users know them from there. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from grpo_core.config.data import (
    DataConfig,
    FileData,
    ReasoningGymData,
    StreamData,
)
from grpo_core.config.environment import (
    ENVIRONMENT_SOURCE,
    EnvironmentConfig,
    HttpEnvironment,
    NoEnvironment,
    PythonEnvironment,
    ReasoningGymEnvironment,
    VerifiersEnvironment,
)
from grpo_core.config.learning import (
    AsyncGRPOConfig,
    GenerationConfig,
    GRPOConfig,
    OptimizerConfig,
    PackingConfig,
    RewardFunction,
    RewardsConfig,
    SamplingConfig,
    ToolFunction,
)
from grpo_core.config.model import (
    ADAPTER_RANKS,
    DirectoryModel,
    LoRAConfig,
    ModelConfig,
    SmolLM2Model,
    TinyModel,
    WarmStart,
)
from grpo_core.config.objective import ObjectiveConfig
from grpo_core.config.operation import (
    EVALUATION_METRIC,
    CheckpointingConfig,
    EvaluationConfig,
    LoggingConfig,
    MetricSink,
    MlflowSink,
    PrometheusSink,
    RefitConfig,
    StorageConfig,
    TensorBoardSink,
    TrackioSink,
    TrainingConfig,
    WandbSink,
)
from grpo_core.config.pool import LOOPBACK, ExternalPool, LocalPool
from grpo_core.config.section import Section
from grpo_core.metrics import EVALUATION_PREFIX, UnknownMetric, metric

__all__ = [
    "ADAPTER_RANKS",
    "ENVIRONMENT_SOURCE",
    "LOOPBACK",
    "AsyncGRPOConfig",
    "CheckpointingConfig",
    "DataConfig",
    "DirectoryModel",
    "EnvironmentConfig",
    "EvaluationConfig",
    "ExternalPool",
    "FileData",
    "GRPOConfig",
    "GenerationConfig",
    "HttpEnvironment",
    "LoRAConfig",
    "LocalPool",
    "LoggingConfig",
    "MetricSink",
    "MlflowSink",
    "ModelConfig",
    "NoEnvironment",
    "ObjectiveConfig",
    "OptimizerConfig",
    "PackingConfig",
    "PrometheusSink",
    "PythonEnvironment",
    "ReasoningGymData",
    "ReasoningGymEnvironment",
    "RefitConfig",
    "RewardFunction",
    "RewardsConfig",
    "RunConfig",
    "SamplingConfig",
    "Section",
    "SmolLM2Model",
    "StorageConfig",
    "StreamData",
    "TensorBoardSink",
    "TinyModel",
    "ToolFunction",
    "TrackioSink",
    "TrainingConfig",
    "VerifiersEnvironment",
    "WandbSink",
    "WarmStart",
]

# What a canary may differ by, nats for each nat of a token's log-prob: three to five times what a right engine does on
# text. SmolLM2-135M is off by 2e-5 where all is float32, by 0.02 where only the weights were rounded to bfloat16, and
# by 0.11 where all is computed in it. Of its thirty layers, one whose query projection is random makes 0.48, one
# without its last matrices 9.7.
EXACT_CANARY, ROUNDED_WEIGHTS_CANARY, ROUNDED_CANARY = 1e-4, 0.1, 0.3

RUN_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"


class RunConfig(Section):
    """One training run."""

    run_id: str = Field(
        "run", pattern=RUN_ID, description="Names everything the run writes; the same name continues the run"
    )
    seed: int = Field(0, ge=0, le=2**53, description="Seed of everything that is drawn, except the data")
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    environment: EnvironmentConfig = NoEnvironment()
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

    @property
    def wire_dtype(self) -> Literal["float32", "bfloat16"]:
        """What the weights travel in: on GPUs what the engines compute in, unless the recipe says otherwise."""
        return self.refit.wire_dtype or (self.model.dtype if self.training.device == "cuda" else "float32")

    @property
    def canary_tolerance(self) -> float:
        """How far an engine may be from the trainer:
        as configured, or several times what rounding alone makes of it."""
        if self.refit.canary_tolerance is not None:
            return self.refit.canary_tolerance
        if self.model.dtype != "float32":
            return ROUNDED_CANARY
        return EXACT_CANARY if self.wire_dtype == "float32" else ROUNDED_WEIGHTS_CANARY

    @model_validator(mode="after")
    def _rules_between_sections(self) -> RunConfig:
        fault = (
            self._window_fault()
            or self._size_fault()
            or self._lease_fault()
            or self._learning_fault()
            or self._metric_fault()
            or self._rollout_fault()
            or self._refit_fault()
            or self._adapter_fault()
            or self._evaluation_fault()
        )
        if fault is not None:
            raise ValueError(fault)
        return self

    def _window_fault(self) -> str | None:
        """Why tokens of older policies would be trained as if they were of the current one."""
        window, objective = self.grpo.async_grpo.max_trajectory_age_steps, self.objective
        if window == 0 or objective.corrects or objective.acknowledge_no_correction:
            return None
        return (
            f"grpo.async_grpo.max_trajectory_age_steps={window} trains on tokens of older policies, but objective.importance_correction is none; "
            "set it to token or sequence, or acknowledge with objective.acknowledge_no_correction=true"
        )

    def _size_fault(self) -> str | None:
        """Why a sequence or a step would not fit, or be too small."""
        if self.generation.max_completion_length >= self.model.context_length:
            return (
                f"generation.max_completion_length={self.generation.max_completion_length} leaves no room for a prompt in "
                f"model.context_length={self.model.context_length}; lower it"
            )
        if self.packing.token_budget < self.model.context_length:
            return f"packing.token_budget={self.packing.token_budget} cannot hold one sequence of model.context_length={self.model.context_length}; raise it"
        rows, ranks = self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt, self.training.ranks
        if rows < ranks * self.training.nodes:
            return f"a step has {rows} rollouts for {ranks * self.training.nodes} trainer ranks; raise grpo.num_prompts_per_step"
        return None

    def _lease_fault(self) -> str | None:
        """Why a lease would be sealed while something in it may still be on time, or the trainer not wait for the next."""
        lease, patience = self.generation.lease_timeout_seconds, self.training.step_timeout_seconds
        if patience <= lease:
            return (
                f"training.step_timeout_seconds={patience:g} calls the trainer stuck before a lost lease is leased "
                f"again after generation.lease_timeout_seconds={lease:g}; raise the first or lower the second"
            )
        timeouts = {
            "generation.request_timeout_seconds": self.generation.request_timeout_seconds,
            "generation.tool_timeout_seconds": self.generation.tool_timeout_seconds,
            "rewards.timeout_seconds": self.rewards.timeout_seconds,
        }
        timeouts |= {
            f"generation.tools {tool.function}.timeout_seconds": tool.timeout_seconds or 0
            for tool in self.generation.tools
        }
        if not isinstance(self.environment, NoEnvironment):
            timeouts["environment.timeout_seconds"] = self.environment.timeout_seconds
        for key, seconds in timeouts.items():
            if seconds >= lease:
                return f"{key}={seconds:g} outlasts a lease, which is sealed after generation.lease_timeout_seconds={lease:g}; lower the first or raise the second"
        return None

    def _learning_fault(self) -> str | None:
        """Why a setting of the algorithm could never matter in this run."""
        shaping, warmup, steps = self.grpo.reward_shaping, self.optimizer.warmup_steps, self.grpo.max_num_steps
        if shaping is not None and shaping.max_response_length > self.most_generated:
            return (
                f"grpo.reward_shaping.max_response_length={shaping.max_response_length} is more than the {self.most_generated} tokens "
                "that can be generated; lower it"
            )
        if warmup > steps:
            return f"optimizer.warmup_steps={warmup} is more than grpo.max_num_steps={steps}, so the learning rate is never reached; lower it"
        return None

    def _metric_fault(self) -> str | None:
        """Why no step could ever have the metric that ranks checkpoints."""
        name = self.checkpointing.metric_name
        if name.startswith(EVALUATION_PREFIX):
            return None
        try:
            found = metric(name)
        except UnknownMetric:
            return f"checkpointing.metric_name={name} is not a metric; docs/metrics.md lists them"
        if found.scope != "step":
            return f"checkpointing.metric_name={name} is not measured by a step; choose one that docs/metrics.md lists for steps"
        source = name.removeprefix("reward/")
        if source != name and source not in self.reward_weights:
            return (
                f"checkpointing.metric_name={name} names no source of reward; they are {', '.join(self.reward_weights)}"
            )
        return None

    def _rollout_fault(self) -> str | None:
        """Why groups could not be made, or not be scored, as configured."""
        size, least, environment = (
            self.grpo.num_generations_per_prompt,
            self.generation.min_group_members,
            self.environment,
        )
        if least is not None and least > size:
            return f"generation.min_group_members={least} is more than grpo.num_generations_per_prompt={size}; lower it"
        if isinstance(environment, NoEnvironment):
            if not self.rewards.functions:
                return "rewards.functions is empty and environment.kind=none gives no reward; name a function or an environment"
            return None
        if environment.instances < size:
            return f"environment.instances={environment.instances} cannot hold one group of grpo.num_generations_per_prompt={size}; raise it"
        if isinstance(environment, ReasoningGymEnvironment) and not isinstance(self.data.source, ReasoningGymData):
            return f"environment.kind=reasoning_gym scores reasoning-gym's tasks, but data.source.kind is {self.data.source.kind}"
        return None

    def _refit_fault(self) -> str | None:
        """Why the weights could not move from this trainer to these engines."""
        backend, training, pool = self.refit.backend, self.training, self.pool
        engines_on = pool.device if isinstance(pool, LocalPool) else None
        if backend == "store":
            return None
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

    def _evaluation_fault(self) -> str | None:
        """Why evaluations could not be made when they are due, or never say what is asked of them."""
        every, metric = self.evaluation.every_steps, self.checkpointing.metric_name
        ranks = metric.startswith(EVALUATION_PREFIX)
        if every is not None and every % self.refit.every_steps:
            return f"evaluation.every_steps={every} is not a multiple of refit.every_steps={self.refit.every_steps}, so no version becomes live then"
        if (every is not None or ranks) and not self.has_held_out:
            key = f"checkpointing.metric_name={metric}" if ranks else f"evaluation.every_steps={every}"
            return f"{key} needs a held-out split, but data.source.held_out_path names none; set it"
        if not ranks:
            return None
        name = metric.removeprefix(EVALUATION_PREFIX)
        known = re.fullmatch(EVALUATION_METRIC, name)
        fault = self.evaluation.fault_of(name) if known else "evaluations have sampled, greedy and pass@k"
        return None if fault is None else f"checkpointing.metric_name={metric} is never computed: {fault}"

    @property
    def has_held_out(self) -> bool:
        """Whether there are prompts to evaluate on."""
        return isinstance(self.data.source, ReasoningGymData) or self.data.source.held_out_path is not None

    def _adapter_fault(self) -> str | None:
        """Why adapters alone could not be refits."""
        if not self.refit.adapter_only:
            return None
        if self.model.lora is None:
            return "refit.adapter_only=true moves adapters, but model.lora gives the policy none; set model.lora, or leave it out"
        if self.model.lora.rank > ADAPTER_RANKS[-1]:
            return f"model.lora.rank={self.model.lora.rank} is more than the {ADAPTER_RANKS[-1]} that engines serve as adapters; lower it, or set refit.adapter_only to false"
        if isinstance(self.pool, ExternalPool) and self.refit.adapter_directory is None:
            return "refit.adapter_only=true needs refit.adapter_directory where engines see it too, as pool.kind is external; name one"
        return None

    @property
    def reward_weights(self) -> dict[str, float]:
        """The factor of each source of reward, by its name in the shards."""
        weights = {source.function: source.weight for source in self.rewards.functions}
        if isinstance(self.environment, NoEnvironment):
            return weights
        return weights | {ENVIRONMENT_SOURCE: self.environment.reward_weight}

    @property
    def most_generated(self) -> int:
        """Generated tokens that a sequence can have: those of one turn,
        or of a whole rollout where it may have several."""
        generation, several = self.generation, bool(self.generation.tools) or self.environment.kind != "none"
        longest = self.model.context_length if several else generation.max_completion_length
        return min(longest, generation.max_rollout_length or longest)

    @property
    def lease_prompts(self) -> int:
        """Prompts of one lease: as configured, or a quarter of a step's."""
        return self.generation.lease_prompts or max(1, self.grpo.num_prompts_per_step // 4)
