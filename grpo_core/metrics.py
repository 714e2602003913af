"""Every metric that a run reports: one name, unit, reduction and description, and what TRL and NeMo RL call it.

Contract: a name that is not here cannot be reported. How values merge over micro-batches and ranks is looked up here
and never guessed from a name, so a source of reward may be called whatever its author likes. A `ratio` stays a pair
(numerator, denominator) until `reported`, so it weighs every token, rollout or second of a step the same. A name that
ends in `/*` is a family: `*` stands for a source of reward, a reason, a lag or a phase.

`python -m grpo_core.metrics` prints docs/metrics.md. Imports nothing of ours, so that the config can check names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

Pair = tuple[float, float]
Measured = Mapping[str, float | Pair]
# ratio: Σ numerators / Σ denominators. sum, max, min: of the values. last: one value of the moment or of the whole.
Reduction = Literal["ratio", "sum", "max", "min", "last"]
Scope = Literal["step", "flow", "evaluation"]
RATIO: Final = "ratio"
SUM: Final = "sum"
MAX: Final = "max"
MIN: Final = "min"
LAST: Final = "last"


class UnknownMetric(KeyError):
    """A name that the registry does not hold."""

    def __str__(self) -> str:
        return f"metric {self.args[0]!r} is not in the registry; add it to grpo_core/metrics.py"


@dataclass(frozen=True, slots=True)
class Metric:
    """`trl` and `nemo_rl` are the names, separated by spaces, of the metrics there that this one answers. `scope`: in
    the ledger footer of its step, measured by the flow when it sees the step, or of an evaluation."""

    name: str
    unit: str
    reduction: Reduction
    description: str
    trl: str = ""
    nemo_rl: str = ""
    scope: Scope = "step"

    @property
    def family(self) -> bool:
        return self.name.endswith("/*")


@dataclass(frozen=True, slots=True)
class Derived:
    """Metrics of another system that follow from ours, whose names stand in backquotes in `formula`."""

    names: str
    formula: str


@dataclass(frozen=True, slots=True)
class Absent:
    """Metrics of another system that no metric here answers, and why."""

    names: str
    why: str


# fmt: off
METRICS: tuple[Metric, ...] = (
    # Objective. Means are per trained token unless they say otherwise.
    Metric("loss", "1", SUM, "objective of the step, the router's term included", "loss", "train/loss"),
    Metric("grad_norm", "1", LAST, "norm of the gradient before clipping, mean of the step's updates", "grad_norm", "train/grad_norm"),
    Metric("learning_rate", "1", LAST, "learning rate of the step", "learning_rate", "train/lr"),
    Metric("ratio", "1", RATIO, "probability ratio current / proximal", "ratio", "train/probs_ratio"),
    Metric("ratio_min", "1", MIN, "smallest ratio of a trained token", "", "train/probs_ratio_min"),
    Metric("ratio_max", "1", MAX, "largest ratio of a trained token", "", "train/probs_ratio_max"),
    Metric("ratio_clamped", "1", RATIO, "ratio as the surrogate uses it", "", "train/probs_ratio_clamped"),
    Metric("ratio_clamped_min", "1", MIN, "smallest ratio as the surrogate uses it", "", "train/probs_ratio_clamped_min"),
    Metric("ratio_clamped_max", "1", MAX, "largest ratio as the surrogate uses it", "", "train/probs_ratio_clamped_max"),
    Metric("kl", "nats", RATIO, "k3 estimate of KL(proximal ‖ current)", "kl"),
    Metric("kl_reference", "nats", RATIO, "KL to the reference model, before beta", "", "train/kl_penalty"),
    Metric("entropy", "nats", RATIO, "entropy of the policy over the whole vocabulary, at the sampling temperature", "entropy"),
    Metric("clip_ratio/low", "share", RATIO, "tokens whose ratio is held from below", "clip_ratio/low_mean"),
    Metric("clip_ratio/high", "share", RATIO, "tokens whose ratio is held from above", "clip_ratio/high_mean"),
    Metric("clip_ratio/region", "share", RATIO, "tokens whose ratio is held", "clip_ratio/region_mean"),
    Metric("clip_ratio/low_min", "share", MIN, "smallest share of a sequence that is held from below", "clip_ratio/low_min"),
    Metric("clip_ratio/high_max", "share", MAX, "largest share of a sequence that is held from above", "clip_ratio/high_max"),
    Metric("importance_weight", "1", RATIO, "importance weight proximal / behaviour, as used"),
    Metric("importance_weight_squared", "1", RATIO, "square of that weight"),
    Metric("importance_clipped", "share", RATIO, "tokens whose importance weight was limited", "", "train/is_oob_ratio"),
    Metric("effective_sample_size", "tokens", LAST, "(Σ w)² / Σ w² of the importance weights w: how many tokens of equal weight say as much"),
    Metric("token_mult_prob_error", "1", RATIO, "exp |log-prob of the trainer − of the engine|; 1 when they agree", "", "train/token_mult_prob_error"),
    Metric("gen_kl_error", "nats", RATIO, "k3 estimate of KL(engine ‖ trainer at the start of the step)", "", "train/gen_kl_error"),
    Metric("policy_kl_error", "nats", RATIO, "the same with the roles exchanged", "", "train/policy_kl_error"),
    Metric("js_divergence_error", "nats", RATIO, "half the sum of both against their average", "", "train/js_divergence_error"),
    Metric("sampling_importance_ratio", "1", RATIO, "trainer's over engine's probability", "", "train/sampling_importance_ratio"),
    Metric("approx_entropy", "nats", RATIO, "entropy estimated at the sampled tokens", "", "train/approx_entropy"),
    Metric("sequence_error", "1", RATIO, "mean exp |difference of log-probs| of a sequence, over sequences"),
    Metric("sequence_error_masked", "share", RATIO, "sequences not believed because of it"),
    Metric("positive_nll", "nats", RATIO, "−log π of tokens of rewarded rollouts", "", "train/positive_nll_loss"),
    Metric("router_imbalance", "1", RATIO, "experts · Σ over experts of (share of tokens sent there · mean probability), mean over layers and trained sequences; the number of experts per token where the load is even", "aux_loss", "moe/*"),
    # Rewards and advantages, over rollouts.
    Metric("reward_mean", "reward", RATIO, "weighted sum of the sources, over rollouts that could be scored", "reward", "train/reward train/mean_total_reward"),
    Metric("reward_mean_decided", "reward", RATIO, "the same, with the groups that were dropped since the step before: dynamic sampling drops the best and the worst"),
    Metric("reward_min", "reward", MIN, "lowest reward of the step", "", "train/min_total_reward"),
    Metric("reward_max", "reward", MAX, "highest reward of the step", "", "train/max_total_reward"),
    Metric("reward_std", "reward", RATIO, "standard deviation of a group's rewards, mean over groups", "reward_std"),
    Metric("reward_shaped", "reward", RATIO, "reward after scaling, discount and penalty"),
    Metric("reward/*", "reward", RATIO, "one source of reward, before its weight", "rewards/<source> rollout/correctness_mean"),
    Metric("zero_variance_share", "share", RATIO, "groups whose rewards are all equal"),
    Metric("unscorable_rollouts", "share", RATIO, "rollouts without a reward, of those that there are"),
    Metric("truncated_rollouts", "share", RATIO, "rollouts that ran out of tokens, of those that there are", "completions/clipped_ratio", "train/truncation_rate"),
    Metric("trained_rollouts", "share", RATIO, "rollouts with a gradient: scored, with a token within the window, and not filtered"),
    Metric("advantage", "1", RATIO, "advantage of trained rollouts, clipped", "", "train/advantages/mean"),
    Metric("advantage_min", "1", MIN, "smallest of them", "", "train/advantages/min"),
    Metric("advantage_max", "1", MAX, "largest of them", "", "train/advantages/max"),
    Metric("advantage_magnitude", "1", RATIO, "mean of their absolute values"),
    Metric("advantage_clipped", "share", RATIO, "rollouts whose advantage was clipped"),
    # Lengths. Generated tokens of a rollout are those of all its turns.
    Metric("completion_tokens_mean", "tokens", RATIO, "generated tokens of a rollout", "completions/mean_length", "train/mean_gen_tokens_per_sample"),
    Metric("completion_tokens_min", "tokens", MIN, "fewest generated tokens of a rollout", "completions/min_length"),
    Metric("completion_tokens_max", "tokens", MAX, "most generated tokens of a rollout", "completions/max_length", "train/max_gen_tokens_per_sample"),
    Metric("turn_tokens_mean", "tokens", RATIO, "generated tokens of a rollout's longest turn", "", "train/max_gen_tokens_per_turn/mean"),
    Metric("turn_tokens_p95", "tokens", LAST, "95th percentile of the same", "", "train/max_gen_tokens_per_turn/p95"),
    Metric("turn_tokens_max", "tokens", MAX, "longest turn of the step", "", "train/max_gen_tokens_per_turn/max"),
    Metric("prompt_tokens_mean", "tokens", RATIO, "tokens of a rollout before its first generated one", "", "train/mean_prompt_length"),
    Metric("environment_tokens_mean", "tokens", RATIO, "tokens of a sequence behind its prompt that were not generated", "", "train/mean_env_tokens_per_sample"),
    Metric("sequence_tokens_mean", "tokens", RATIO, "all tokens of a sequence", "sample/forwarded_tokens_mean", "train/mean_total_tokens_per_sample"),
    Metric("sequence_tokens_max", "tokens", MAX, "all tokens of the longest sequence", "sample/forwarded_tokens_max"),
    Metric("trained_tokens_mean", "tokens", RATIO, "trained tokens of a sequence", "sample/trained_tokens_mean"),
    Metric("length_ratio", "1", LAST, "generated tokens of a trained rollout over those of one that was decided about since the last step, dropped and returned ones included; 1: training does not prefer short answers"),
    # Rollouts, from the facts in their shards.
    Metric("rollout/turns_mean", "turns", RATIO, "turns of a rollout", "rollout/turns_mean", "train/avg_turns_per_sample"),
    Metric("rollout/turns_p95", "turns", LAST, "95th percentile of the same", "", "train/turns_per_sample/p95"),
    Metric("rollout/turns_p99", "turns", LAST, "99th percentile of the same", "", "train/turns_per_sample/p99"),
    Metric("rollout/turns_max", "turns", MAX, "most turns of a rollout", "rollout/turns_max", "train/max_turns_per_sample"),
    Metric("rollout/turns_total", "turns", SUM, "turns of all rollouts", "", "train/total_turns"),
    Metric("rollout/natural_end_share", "share", RATIO, "rollouts that the model or the environment ended", "", "train/natural_termination_rate"),
    Metric("rollout/turn_limit_share", "share", RATIO, "rollouts cut by generation.max_tool_calling_iterations", "tools/loop_exhausted_frac", "train/max_turns_reached_rate"),
    Metric("rollout/seconds_mean", "seconds", RATIO, "from the first request to the last answer of a rollout", "rollout/duration_s", "train/trajectory_duration_s"),
    Metric("rollout/seconds_p95", "seconds", LAST, "95th percentile of the same", "", "train/trajectory_duration_s/p95"),
    Metric("rollout/seconds_max", "seconds", MAX, "longest rollout", "", "train/trajectory_duration_s/max"),
    Metric("rollout/generation_seconds", "seconds", RATIO, "the part of a rollout that neither tools nor its environment took", "rollout/generate_s"),
    Metric("rollout/tool_seconds", "seconds", RATIO, "the part of a rollout that tools took, a round as long as its slowest call", "rollout/tool_s"),
    Metric("rollout/queue_seconds", "seconds", RATIO, "from the last answer of a rollout until a step took it", "sample/time_in_queue_s"),
    Metric("rollout/sequences", "sequences", RATIO, "sequences of a rollout", "rollout/samples_per_rollout"),
    Metric("rollout/fork_share", "share", RATIO, "joins of two turns that began a new sequence", "rollout/fork_frac"),
    Metric("rollout/realign_share", "share", RATIO, "joins of two turns that were realigned", "rollout/realign_frac"),
    Metric("rollout/drift_tokens_mean", "tokens", RATIO, "tokens of drift at a join", "rollout/drift_tokens_mean"),
    Metric("rollout/drift_tokens_max", "tokens", MAX, "most tokens of drift at a join", "rollout/drift_tokens_max"),
    Metric("rollout/failed_requests", "requests", SUM, "requests that an engine lost, refused or answered unusably, each made again within its budget; of all groups decided about since the step before", "rollout/vllm_retry_total", "rollout/redispatch_total"),
    Metric("rollout/aborted_requests", "requests", SUM, "requests cut off because they had become too old to be trained on, of the same groups", "", "aborted_stale_inflight_groups"),
    Metric("scoring/seconds", "seconds", RATIO, "from when a reward worker took a group until it was scored, of the same groups", "rollout/score_s"),
    Metric("scoring/wait_seconds", "seconds", RATIO, "from a group's last rollout until a reward worker took it, of the same groups", "rollout/score_wait_s"),
    Metric("environment/reset_seconds", "seconds", RATIO, "time of a reset of the environment", "env/reset_s"),
    Metric("environment/step_seconds", "seconds", RATIO, "time of a step of the environment"),
    Metric("environment/reward_seconds", "seconds", RATIO, "time in which the environment says its reward", "env/reward_s"),
    Metric("tools/calls", "calls", SUM, "tool calls of all rollouts, those of their environment's tools included"),
    Metric("tools/calls_mean", "calls", RATIO, "tool calls of a rollout", "tools/call_frequency"),
    Metric("tools/failure_share", "share", RATIO, "calls that failed, unknown and malformed ones included, of those that were not the environment's to answer", "tools/failure_frequency"),
    Metric("tools/seconds", "seconds", RATIO, "time of a call of a tool of ours", "tools/latency_s"),
    Metric("tools/calls_per_round", "calls", RATIO, "tool calls of an answer that makes any", "tools/parallel_calls_mean"),
    Metric("tools/unknown_calls", "calls", SUM, "calls of tools that do not exist", "tools/unknown_name_total"),
    Metric("tools/malformed_calls", "calls", SUM, "calls that could not be read"),
    Metric("tool_calls/*", "calls", SUM, "calls of this tool", "tools/<name>/call_total"),
    Metric("tool_failures/*", "calls", SUM, "calls of this tool that failed", "tools/<name>/failure_total"),
    Metric("tool_seconds/*", "seconds", RATIO, "time of a call of this tool", "tools/<name>/latency_s"),
    # What the step held.
    Metric("epoch", "epochs", MAX, "passes over the data before that of the step's newest group", "epoch"),
    Metric("ranks", "ranks", LAST, "ranks of the trainer, one per GPU"),
    Metric("groups", "groups", SUM, "groups trained", "batch/groups_per_step"),
    Metric("rollouts", "rollouts", SUM, "rollouts of those groups"),
    Metric("sequences", "sequences", SUM, "their sequences", "batch/samples_per_step"),
    Metric("trained_sequences", "sequences", SUM, "sequences with a trained token", "", "train/global_valid_seqs train/num_valid_samples"),
    Metric("forwarded_tokens", "tokens", SUM, "all tokens of their sequences, before prefixes are shared", "batch/forwarded_tokens_per_step", "train/total_num_tokens"),
    Metric("trained_tokens", "tokens", SUM, "tokens with a gradient", "batch/trained_tokens_per_step", "train/global_valid_toks"),
    Metric("masked_token_share", "share", RATIO, "generated tokens without a gradient"),
    Metric("untrained_token_share", "share", RATIO, "tokens without a gradient, prompts included", "batch/masked_token_frac"),
    Metric("updates", "updates", SUM, "optimizer updates"),
    Metric("micro_batches", "micro-batches", SUM, "forward and backward passes of each rank", "batch/microbatches_per_step"),
    Metric("sequences_per_micro_batch", "sequences", RATIO, "sequences of a micro-batch of one rank", "batch/samples_per_row"),
    Metric("micro_batch_tokens_mean", "tokens", RATIO, "tokens of a micro-batch of one rank, shared prefixes counted once", "batch/row_tokens_mean"),
    Metric("micro_batch_tokens_max", "tokens", MAX, "the largest of them", "batch/row_tokens_max"),
    Metric("micro_batch_fill", "share", RATIO, "tokens over packing.token_budget", "batch/row_fill_frac"),
    Metric("rank_imbalance", "1", RATIO, "most tokens of a rank over the mean, before prefixes are shared, mean over micro-batches", "batch/row_imbalance", "performance/average_token_imbalance"),
    Metric("prefix_tokens_saved", "share", RATIO, "tokens saved by shared prefixes"),
    # Time of the trainer, in wall time of rank 0.
    Metric("wait_seconds", "seconds", SUM, "waiting for groups", "perf/rollout_wait_s", "timing/train/exposed_generation timing/train/idle/buffer_starvation efficiency/idle/buffer_starvation"),
    Metric("plan_seconds", "seconds", SUM, "shaped rewards, advantages, filters, packing and plan", "", "timing/train/reward_calculation timing/train/advantage_calculation timing/train/overlong_filter timing/train/mask_sample_filter timing/train/data_processing timing/train/training_prep timing/train/logprob_inference_prep"),
    Metric("step_seconds", "seconds", SUM, "the step on the trainer, from plan to new weights", "", "efficiency/productive_time_s"),
    Metric("logprob_seconds", "seconds", SUM, "of it: log-probs without a gradient, of the old policy and of the reference", "", "timing/train/policy_and_reference_logprobs"),
    Metric("forward_seconds", "seconds", SUM, "of it: forward passes; on GPUs the time to launch them", "perf/fwd_s"),
    Metric("forward_backward_seconds", "seconds", SUM, "of it: forward passes, loss and backward passes", "perf/fwd_bwd_s"),
    Metric("optimizer_seconds", "seconds", SUM, "of it: clipping and updates", "perf/optimizer_s"),
    Metric("iteration_seconds", "seconds", SUM, "from the end of the step before to the end of this one, all included; the first step of an attempt has none", "perf/step_s", "timing/train/total_step_time efficiency/total_wall_time_s"),
    Metric("checkpoint_seconds", "seconds", LAST, "the last save, from copy to manifest"),
    Metric("checkpoint_blocked_seconds", "seconds", LAST, "how long the last save kept the loop", "", "timing/train/checkpointing"),
    Metric("refit_seconds", "seconds", SUM, "refits since the step before", "perf/weight_sync_s", "timing/train/weight_sync timing/train/idle/refit_bubble efficiency/idle/refit_bubble"),
    Metric("refit_phase_seconds/*", "seconds", SUM, "a phase of those refits: connect, pause, start, transfer, finish, resume, canary", "perf/weight_sync_pause_s perf/weight_sync_barrier_s perf/weight_sync_transfer_s", "refit/*"),
    Metric("refit_bytes", "bytes", SUM, "what each engine received in them"),
    Metric("refit_canary", "nats", MAX, "largest difference of a log-prob between engine and trainer after a refit"),
    # Utilisation of the trainer. Rates are those of all ranks together.
    Metric("trainer_utilisation", "share", RATIO, "step_seconds / iteration_seconds"),
    Metric("wait_share", "share", RATIO, "wait_seconds / iteration_seconds", "", "performance/training_worker_idle_time_ratio"),
    Metric("trained_tokens_per_second", "tokens/s", RATIO, "over iteration_seconds", "perf/trained_tok_s_wall_clock"),
    Metric("forwarded_tokens_per_second", "tokens/s", RATIO, "over iteration_seconds", "perf/forwarded_tok_s_wall_clock", "performance/tokens_per_sec"),
    Metric("forwarded_tokens_per_busy_second", "tokens/s", RATIO, "over step_seconds", "", "performance/training_worker_group_tokens_per_sec"),
    Metric("rollouts_per_second", "rollouts/s", RATIO, "over iteration_seconds", "", "performance/samples_per_sec"),
    Metric("flops_per_second", "FLOP/s", RATIO, "the model's arithmetic of the step over step_seconds, per device", "", "performance/train_flops_per_gpu"),
    Metric("mfu_of_busy", "share", RATIO, "model FLOPs utilisation over step_seconds; absent where the device's peak is not known", "", "performance/train_fp_utilization"),
    Metric("mfu_of_wall", "share", RATIO, "model FLOPs utilisation over iteration_seconds"),
    # Buffer, lag and waste. Decisions are those since the step before.
    Metric("ready_groups", "groups", LAST, "groups ready when the trainer began to wait"),
    Metric("buffered_groups", "groups", LAST, "groups left in the buffer when the step began", "sample/rollout_queue_size", "train/buffer_size"),
    Metric("in_flight_groups", "groups", LAST, "groups in flight when the step began", "rollout/inflight", "rollout/inflight"),
    Metric("lag_mean", "versions", RATIO, "training version less that of a trained token", "sample/staleness_mean", "train/avg_trajectory_age"),
    Metric("lag_max", "versions", MAX, "largest lag of a trained token", "sample/staleness_max"),
    Metric("lag_tokens/*", "tokens", SUM, "trained tokens of this lag"),
    Metric("dropped_groups/*", "groups", SUM, "groups dropped for this reason; the next prompts take their places", "", "dropped_prompt_groups replaced_prompt_groups"),
    Metric("returned_groups/*", "groups", SUM, "groups returned, to be generated again, for this reason", "sample/dropped_stale_total", "evicted_stale_prompt_groups"),
    Metric("wasted_tokens/*", "tokens", SUM, "generated tokens that were not trained, by cause: masked; discarded, with turns of rollouts that were begun again; or the reason why their group was dropped or returned", "", "efficiency/wasted/failed_trajectory"),
    Metric("wasted_token_share", "share", RATIO, "those tokens over all generated tokens that were decided about"),
    # The pool, as the flow sees it with the step.
    Metric("pool/engines", "engines", LAST, "engines that get requests", scope="flow"),
    Metric("pool/queued", "requests", LAST, "requests that wait for an engine", scope="flow"),
    Metric("pool/running", "requests", LAST, "requests that the engines run", "", "generation_metrics/inflight_batch_sizes", scope="flow"),
    Metric("pool/waiting", "requests", LAST, "requests that wait in the engines", "", "generation_metrics/num_pending_samples", scope="flow"),
    Metric("pool/kv_usage", "share", MAX, "use of the fullest engine's key-value cache", scope="flow"),
    Metric("pool/preemptions", "requests", SUM, "requests evicted between the last two looks", scope="flow"),
    Metric("pool/prefix_hit_rate", "share", RATIO, "prompt tokens found in a cache between the last two looks", scope="flow"),
    Metric("pool/utilisation", "share", RATIO, "time of the last minute with a request in flight", scope="flow"),
    Metric("pool/held_back", "share", RATIO, "time of the last minute without a request in flight because the window had no room for another lease", "rollout/backpressure_s", "efficiency/idle/buffer_full_backoff efficiency/idle/generation_limit_pause", scope="flow"),
    Metric("pool/tokens_per_second", "tokens/s", RATIO, "tokens generated in the last minute", "rollout/generated_tok_s", "performance/generation_tokens_per_sec", scope="flow"),
    Metric("pool/silent_seconds", "seconds", LAST, "since a group was last finished", "", "rollout/idle_s", scope="flow"),
    Metric("scoring/queued", "groups", LAST, "groups that wait for a reward worker", "rollout/score_queue_size", scope="flow"),
    # Evaluations, at the step whose weights they judge.
    Metric("evaluation/*", "reward", RATIO, "mean reward of the held-out split, sampled and greedy, and pass@k", "", "validation/accuracy validation/pass_k", scope="evaluation"),
    Metric("evaluation_error/*", "reward", LAST, "standard error of that mean", scope="evaluation"),
    Metric("evaluation_tokens_mean", "tokens", RATIO, "generated tokens of a held-out completion", "", "validation/avg_length", scope="evaluation"),
    Metric("evaluation_purity", "share", RATIO, "tokens that the version itself sampled, before engines moved on to the next", scope="evaluation"),
    Metric("evaluation_seconds", "seconds", LAST, "from the first request to the last reward", "", "timing/validation/total_validation_time", scope="evaluation"),
)
DERIVED_FOR_TRL: tuple[Derived, ...] = (
    Derived("batch/packing_ratio", "1 / (1 − `prefix_tokens_saved`)"),
    Derived("perf/forwarded_tok_s_fwd_bwd", "`forwarded_tokens` / `forward_backward_seconds`"),
    Derived("perf/mfu_fwd_bwd", "100 × `mfu_of_busy` × `step_seconds` / `forward_backward_seconds`"),
    Derived("perf/mfu_wall_clock", "100 × `mfu_of_wall`"),
)
DERIVED_FOR_NEMO_RL: tuple[Derived, ...] = (
    Derived("train/num_mask_sample_filtered", "`rollouts` × (1 − `trained_rollouts`)"),
    Derived("train/invalid_tool_call_rate", "(`tools/unknown_calls` + `tools/malformed_calls`) / `rollout/turns_total`"),
    Derived("timing/train/policy_training", "`step_seconds` − `logprob_seconds`"),
    Derived("timing/train/valid_tokens_per_sec_per_gpu", "`trained_tokens_per_second` / `ranks`"),
    Derived("performance/samples_per_sec_per_gpu", "`rollouts_per_second` / `ranks`"),
    Derived("performance/tokens_per_sec_per_gpu", "`forwarded_tokens_per_second` / `ranks`"),
    Derived("performance/training_worker_group_tokens_per_sec_per_gpu", "`forwarded_tokens_per_busy_second` / `ranks`"),
    Derived("performance/policy_training_tokens_per_sec_per_gpu", "`forwarded_tokens` / (`step_seconds` − `logprob_seconds`) / `ranks`"),
    Derived("performance/policy_and_reference_logprobs_tokens_per_sec_per_gpu", "`forwarded_tokens` / `logprob_seconds` / `ranks`"),
    Derived("performance/generation_tokens_per_sec_per_gpu", "`pool/tokens_per_second` / `pool/engines` / GPUs of an engine"),
    Derived("efficiency/efficiency_pct", "100 × `trainer_utilisation`"),
    Derived("efficiency/total_waste_s", "`iteration_seconds` − `step_seconds`"),
)
ABSENT_FROM_TRL: tuple[Absent, ...] = (
    Absent("rollout/score_block_s", "generation never waits for scoring: what bounds the groups that wait is the window"),
    Absent("batch/pad_frac", "micro-batches are flat: nothing is padded"),
    Absent("batch/dropped_oversize_total", "no sequence is dropped for its length: the config refuses a budget below model.context_length"),
)
ABSENT_FROM_NEMO_RL: tuple[Absent, ...] = (
    Absent("train/wd", "a constant of the recipe: optimizer.weight_decay"),
    Absent("train/histogram/gen_tokens_length train/histogram/input_tokens_length train/histogram/total_tokens_length", "a metric is one number; the lengths of every sequence are in trajectories/"),
    Absent("mtp/*", "multi-token prediction heads are not trained"),
    Absent("timing/train/idle/validation efficiency/idle/validation", "training does not wait for an evaluation; only that of version 0 comes before it"),
    Absent("efficiency/init/total", "it ends before the first step: attempts/ says when an attempt began and the page of the flow how long each of its phases took"),
    Absent("efficiency/idle/refit_event_wait", "requests stay in flight during a refit; the pause is refit_phase_seconds/pause"),
    Absent("promoted_prompt_groups", "no step borrows the group of a later one: the next prompts take the place of a dropped one"),
)
# fmt: on

REGISTRY: dict[str, Metric] = {metric.name: metric for metric in METRICS}
# Names of evaluations are those of their held-out sets and modes.
EVALUATION_PREFIX = "evaluation/"


def metric(name: str) -> Metric:
    """The metric of this name, or the family it belongs to. Raise UnknownMetric."""
    if name in REGISTRY:
        return REGISTRY[name]
    family, _, member = name.partition("/")
    if member and f"{family}/*" in REGISTRY:
        return REGISTRY[f"{family}/*"]
    raise UnknownMetric(name)


def reported(measured: Measured) -> dict[str, float]:
    """What a step measured as one number each; a ratio of nothing is left out. Raise UnknownMetric."""
    values = {}
    for name, value in measured.items():
        metric(name)
        if not isinstance(value, tuple):
            values[name] = float(value)
        elif value[1]:
            values[name] = value[0] / value[1]
    return values


def extreme_sign(name: str) -> float:
    """1 for a metric that merges by max and -1 for one by min:
    sign · max(sign · values) is either. Raise UnknownMetric."""
    reduction = metric(name).reduction
    assert reduction in (MAX, MIN), f"{name} merges by {reduction}"
    return 1.0 if reduction == MAX else -1.0


def finite(values: Mapping[str, float | None]) -> dict[str, float]:
    """Those that are numbers."""
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


def page() -> str:
    """docs/metrics.md."""
    scopes = {
        "step": "In the footer of each step's ledger file",
        "flow": "Measured by the flow when it sees a step",
        "evaluation": "Of an evaluation",
    }
    lines = [
        "# Metrics",
        "",
        "Generated by `python -m grpo_core.metrics > docs/metrics.md`.",
        "",
        "A `ratio` is Σ numerators / Σ denominators over everything its step held, `sum`, `max` and `min` merge values over",
        "micro-batches, ranks and rollouts, and `last` is one value of the moment or of the whole step. `/*` stands for the",
        "members of a family, such as the sources of reward. Rates and times are those of one step; utilisation of the pool",
        "is that of the last minute.",
        "",
        "The tables of other systems say which metric of ours answers theirs, after `=` how theirs follows from ours, and",
        "after – why there is none.",
        "",
        "All of them are in `metrics/**/*.parquet` of the run's store, one row per step and metric:",
        "",
        "```sql",
        "SELECT step, value FROM 'forebay-runs/quickstart/metrics/**/*.parquet' WHERE name = 'reward_mean'",
        "QUALIFY attempt = max(attempt) OVER (PARTITION BY step) ORDER BY step;",
        "```",
    ]
    for scope, title in scopes.items():
        lines += ["", f"## {title}", ""]
        lines += _table(
            ("metric", "unit", "reduction", "description"),
            (
                (f"`{each.name}`", each.unit, each.reduction, each.description)
                for each in METRICS
                if each.scope == scope
            ),
        )
    for title, answers, derived, absent in (
        ("TRL", {each.name: each.trl for each in METRICS}, DERIVED_FOR_TRL, ABSENT_FROM_TRL),
        ("NeMo RL", {each.name: each.nemo_rl for each in METRICS}, DERIVED_FOR_NEMO_RL, ABSENT_FROM_NEMO_RL),
    ):
        lines += ["", f"## {title} → Forebay", ""]
        lines += _table((title, "Forebay"), theirs(answers, derived, absent))
    return "\n".join(lines) + "\n"


def theirs(answers: Mapping[str, str], derived: Iterable[Derived], absent: Iterable[Absent]) -> list[tuple[str, str]]:
    """(their name, our name, or how it follows from ours, or why there is none), by their name."""
    rows = [(f"`{name}`", f"`{ours}`") for ours, names in answers.items() for name in names.split()]
    rows += [(f"`{name}`", f"= {each.formula}") for each in derived for name in each.names.split()]
    rows += [(f"`{name}`", f"– {each.why}") for each in absent for name in each.names.split()]
    return sorted(rows)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    cells = ([cell.replace("|", "\\|") for cell in row] for row in (head, ("--",) * len(head), *rows))
    return [f"| {' | '.join(row)} |" for row in cells]


if __name__ == "__main__":
    print(page(), end="")
