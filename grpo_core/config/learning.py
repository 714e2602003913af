"""What is learnt and how: rewards, sampling, generation, algorithm, optimizer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from grpo_core.config.section import Importable, PositiveInt, Section, by_its_name


class RewardFunction(Section):
    """One source of reward: `module:function` with TRL's signature (completions, prompts, completion_ids, **columns). A
    name alone may be written as text."""

    function: Importable = Field(description="module:function, importable from the working directory")
    weight: float = Field(1.0, ge=-1e6, le=1e6, description="Factor of this source in the reward")

    _by_its_name = model_validator(mode="before")(by_its_name)


class RewardsConfig(Section):
    """How a group is scored; the reward of a rollout is the weighted sum of its sources."""

    functions: tuple[RewardFunction, ...] = Field(
        (RewardFunction(function="grpo_core.rollout.rewards:reasoning_gym_score"),),
        description="The sources of reward; may be empty where the environment gives one",
    )
    timeout_seconds: float = Field(60, gt=0, le=1e9, description="Longest time for scoring one group")
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
    """How tokens are drawn. Always sent explicitly, so a model's generation_config.json cannot leak in.

    What truncates the distribution is refused: the engine's log-probs are then those of the tokens that it kept under
    its own weights. The trainer's weights are others and would keep others, so that its ratio would be wrong by the
    kept mass, token by token; and what was kept is not recorded.
    """

    temperature: float = Field(
        1.0,
        ge=0.01,
        le=10,
        description="Divides the logits, in the engine and in the trainer alike; below 0.01 the engine takes 0.01",
    )
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; only 1.0 is unbiased")
    top_k: int = Field(0, ge=0, le=2**31, description="0: all tokens")
    min_p: float = Field(
        0.0, ge=0, le=1, description="Least probability relative to the likeliest token; only 0.0 is unbiased"
    )
    repetition_penalty: float = Field(1.0, gt=0, le=100, description="Penalty of repeated tokens; only 1.0 is unbiased")

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


class ToolFunction(Section):
    """A function that the policy may call. A name alone may be written as text."""

    function: Importable = Field(description="module:function, plain or async")
    timeout_seconds: float | None = Field(
        None, gt=0, le=1e9, description="Longest time for one call of it; default: generation.tool_timeout_seconds"
    )

    _by_its_name = model_validator(mode="before")(by_its_name)


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
    flush_seconds: float = Field(
        2.0, gt=0, le=1e9, description="A part is committed at least this often while groups finish"
    )
    request_timeout_seconds: float = Field(
        300,
        gt=0,
        le=1e9,
        description="Longest time from sending a turn to an engine to its answer, with the wait for a place in the engine and the refits on the way; also what a refit without in_flight_weight_updates gives the requests to end",
    )
    max_rollout_attempts: PositiveInt = Field(
        3,
        description="Times each of these is tried: a turn, on whatever engine; a rollout whose environment failed or that was cut off; a prompt whose leases failed or expired, or that was alone when the flow died",
    )
    min_group_members: int | None = Field(
        None,
        ge=2,
        le=2**53,
        description="Rollouts that must be left for a group to be trained without the failed ones; default: all",
    )
    tools: tuple[ToolFunction, ...] = Field(
        (), description="Functions the policy may call, each as module:function or with a time of its own"
    )
    tool_format: Literal["hermes", "llama", "mistral", "pythonic"] = Field(
        "hermes", description="How the policy writes a call; see grpo_core/rollout/tool_calls.py"
    )
    tool_timeout_seconds: float = Field(
        30, gt=0, le=1e9, description="Longest time for one call of a tool that names none; then the policy reads so"
    )
    max_tool_calling_iterations: int | None = Field(
        None,
        ge=0,
        le=2**53,
        description="Rounds of tool calls in one rollout; the next call ends it. Default: no limit",
    )
    lease_timeout_seconds: float = Field(
        900, gt=0, le=1e9, description="A lease older than this is sealed; what is missing of it is leased again"
    )
    fork_threshold_tokens: int = Field(
        1024,
        ge=0,
        le=2**53,
        description="A rewritten history that differs in fewer tokens is realigned; otherwise a new sequence starts",
    )

    @model_validator(mode="after")
    def _tools_differ(self) -> GenerationConfig:
        names = [tool.function.partition(":")[2].rpartition(".")[2] for tool in self.tools]
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
        3, ge=0, le=2**53, description="Consecutive failed groups tolerated; 0: the first is fatal"
    )
    max_batches_without_group: PositiveInt = Field(
        10, description="Batches of groups in a row of which none can be trained, before the run stops with the cause"
    )
    in_flight_weight_updates: bool = Field(
        True, description="Running requests are kept across a refit, of adapters too; otherwise they are drained first"
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


class RewardScaling(Section):
    """Rewards are clamped to the source interval, which is mapped linearly onto the target interval."""

    source_min: float = Field(0.0, ge=-1e6, le=1e6, description="Reward that becomes target_min, as do those below")
    source_max: float = Field(1.0, ge=-1e6, le=1e6, description="Reward that becomes target_max, as do those above")
    target_min: float = Field(0.0, ge=-1e6, le=1e6, description="What source_min becomes")
    target_max: float = Field(1.0, ge=-1e6, le=1e6, description="What source_max becomes")

    @model_validator(mode="after")
    def _source_is_an_interval(self) -> RewardScaling:
        if self.source_min >= self.source_max:
            raise ValueError(
                f"grpo.reward_scaling.source_min={self.source_min:g} is not below source_max={self.source_max:g}; lower it"
            )
        if self.target_min == self.target_max:
            raise ValueError(
                f"grpo.reward_scaling.target_min={self.target_min:g} equals target_max, so that every reward is the same; change one"
            )
        return self


class RewardShaping(Section):
    """Rollouts that run long, or out of tokens, lose reward."""

    max_response_length: PositiveInt = Field(description="Generated tokens of a rollout at which the penalty is full")
    overlong_buffer_length: int = Field(
        128, ge=0, le=2**31, description="Tokens before that over which the penalty grows from 0 (DAPO); 0: no penalty"
    )
    overlong_buffer_penalty: float = Field(1.0, ge=0, le=1e6, description="The full penalty")
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
        if self.truncated_coefficient == 1 and 0 in (self.overlong_buffer_length, self.overlong_buffer_penalty):
            raise ValueError(
                "grpo.reward_shaping changes no reward: without a buffer, or a penalty, and with truncated_coefficient=1; leave it out"
            )
        return self


class GRPOConfig(Section):
    """The algorithm's shape."""

    num_prompts_per_step: PositiveInt = Field(32, description="Groups that one optimizer step trains")
    num_generations_per_prompt: int = Field(8, ge=2, le=2**31, description="Rollouts of one group")
    minibatches: PositiveInt = Field(
        1,
        description="Parts of a step's groups, each of which makes one optimizer update; 1: the policy is updated once",
    )
    max_num_steps: PositiveInt = Field(100, description="Optimizer steps of the run")
    max_num_epochs: PositiveInt | None = Field(
        None, description="Stop after this many passes over the data, if that comes first"
    )
    use_dynamic_sampling: bool = Field(
        False,
        description="Drop groups in which no rollout has an advantage, as where all rewards are equal, and generate others "
        "in their place",
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
    advantage_clip_low: float | None = Field(None, ge=-1e6, le=0, description="Lowest advantage; none: unbounded")
    advantage_clip_high: float | None = Field(None, ge=0, le=1e6, description="Highest advantage; none: unbounded")
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

    @model_validator(mode="after")
    def _compares_what_it_says(self) -> GRPOConfig:
        if self.advantage_scale == "none" and self.advantage_ddof is not None:
            raise ValueError(
                f"grpo.advantage_ddof={self.advantage_ddof} has no effect with grpo.advantage_scale=none; leave it out"
            )
        if self.advantage_baseline == "none" and self.use_dynamic_sampling:
            raise ValueError(
                "grpo.use_dynamic_sampling=true drops groups of equal rewards, which grpo.advantage_baseline=none trains like all others; "
                "change one of the two"
            )
        return self


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(1e-6, gt=0, le=1, description="Highest learning rate")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment")
    beta2: float = Field(0.999, ge=0, lt=1, description="Decay of the second moment")
    eps: float = Field(1e-8, gt=0, le=1, description="Added to the root of the second moment")
    weight_decay: float = Field(0.0, ge=0, le=100, description="Decoupled decay of matrices; vectors never decay")
    max_grad_norm: float = Field(1.0, gt=0, le=1e9, description="The gradient is scaled down to this norm")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="How the learning rate falls after the warm-up"
    )
    warmup_steps: int = Field(0, ge=0, le=2**53, description="Steps of linear warm-up")


class PackingConfig(Section):
    """Micro-batches."""

    token_budget: PositiveInt = Field(16384, description="Tokens of one micro-batch on one rank")
    share_prefixes: bool = Field(
        True, description="The prompt of a group goes through the model once for all of its sequences in a row"
    )
