"""How and where a run is carried out: trainer, refits, checkpoints, evaluation, store, logging."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from grpo_core.config.section import PositiveInt, Section

# The metrics of an evaluation.
EVALUATION_METRIC = r"^(sampled|greedy|pass@\d{1,6})$"


class TrainingConfig(Section):
    """The trainer group."""

    ranks: PositiveInt = Field(1, description="Processes of the torchrun group on this machine")
    nodes: PositiveInt = Field(
        1, description="Machines of the torchrun group; the other machines run the same torchrun line"
    )
    rendezvous: str | None = Field(
        None, pattern=r"^[\w.-]+:\d+$", description="host:port of the first machine, for more than one"
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="What the trainer computes on")
    threads: PositiveInt = Field(1, description="CPU threads of each rank")
    activation_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass, to save memory"
    )
    torch_compile: bool = Field(False, description="Compile each layer with torch.compile, on first use")
    cpu_offload: bool = Field(
        False,
        description="Keep weights and optimizer state in the machine's memory, and bring layers to the GPU in turn",
    )
    step_timeout_seconds: float = Field(
        1800,
        gt=0,
        le=1e9,
        description="Longest time without progress before the trainer is called stuck; more than generation.lease_timeout_seconds",
    )
    python: Path | None = Field(None, description="Interpreter of the trainer, for an environment of its own")

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> TrainingConfig:
        if self.nodes > 1 and self.rendezvous is None:
            raise ValueError(f"training.nodes={self.nodes} needs training.rendezvous=host:port of the first machine")
        if self.cpu_offload and self.device == "cpu":
            raise ValueError("training.cpu_offload=true unburdens a GPU, but training.device is cpu; set it to false")
        return self


class RefitConfig(Section):
    """Moving weights into the engines."""

    backend: Literal["gloo", "nccl", "ipc", "store"] = Field(
        "gloo",
        description="gloo: CPU engines; nccl: engines with GPUs of their own; ipc: engine and trainer share one GPU; store: engines fetch from the object store",
    )
    wire_dtype: Literal["float32", "bfloat16"] | None = Field(
        None,
        description="Precision of the weights on their way; default: model.dtype when the trainer has GPUs, float32 on CPUs",
    )
    full_every: PositiveInt = Field(
        16,
        description="backend=store: versions from one full one to the next; those between are differences. 1: all are full",
    )
    adapter_only: bool = Field(
        False,
        description="With model.lora: move the adapter of each version instead of the weights it amounts to, without a pause while grpo.async_grpo.in_flight_weight_updates is true; the backend moves the frozen weights once in an attempt",
    )
    adapter_directory: Path | None = Field(
        None,
        description="With adapter_only: where adapters are kept, under the same path for the trainer and every engine; default: below model.cache_directory",
    )
    every_steps: PositiveInt = Field(1, description="Optimizer steps from one version to the next")
    control_timeout_seconds: float = Field(60, gt=0, le=1e9, description="Longest time for one control call")
    transfer_timeout_seconds: float = Field(
        300, gt=0, le=1e9, description="Longest time for the transfer to one engine"
    )
    canary_tolerance: float | None = Field(
        None,
        gt=0,
        le=1e3,
        description="Largest difference between trainer and engine on a fixed text after a refit, nats for each nat of a token's log-prob; default: 1e-4 where all is float32, 0.1 where only the wire is bfloat16, 0.3 where model.dtype is",
    )


class CheckpointingConfig(Section):
    """What survives a crash."""

    save_period: PositiveInt = Field(10, description="Steps from one checkpoint to the next")
    keep_last: PositiveInt = Field(2, description="Newest checkpoints kept")
    keep_top_k: int = Field(1, ge=0, le=2**53, description="Best checkpoints kept beside the newest")
    metric_name: str = Field(
        "reward_mean",
        description="Metric by which checkpoints are ranked: a training metric of the saved step, or evaluation/sampled, evaluation/greedy or evaluation/pass@k of the newest evaluation at or before it; one without it is never best",
    )
    higher_is_better: bool = Field(True, description="Whether the best checkpoint is that of the highest metric")
    async_save: bool = Field(
        True,
        description="Write checkpoints while later steps run; either way each rank keeps one copy of its tensors in host memory",
    )
    load_replay_buffer: bool = Field(
        True, description="Resume with the buffered groups; otherwise they are generated again"
    )


class EvaluationConfig(Section):
    """The held-out split, sampled at the training temperature and, beside it, greedily."""

    at_start: bool = Field(True, description="Evaluate version 0, before anything is trained")
    every_steps: PositiveInt | None = Field(
        None,
        description="Also evaluate the version that every so many steps become live, while training goes on; a multiple of refit.every_steps",
    )
    at_end: bool = Field(True, description="Evaluate the last version")
    samples: PositiveInt = Field(512, description="Sampled completions of one evaluation, at most")
    samples_per_prompt: PositiveInt | None = Field(
        None,
        description="Sampled completions of each prompt, for pass@k with k up to it, of as many prompts as `samples` allow; default: `samples` are spread over all prompts",
    )
    pass_threshold: float = Field(
        1.0, ge=-1e6, le=1e6, description="Reward from which on a completion passes, for pass@k"
    )
    greedy: bool = Field(
        True,
        description="Also answer each prompt that is sampled once more, at temperature 0; these are not of `samples`",
    )
    timeout_seconds: float = Field(
        1800,
        gt=0,
        le=1e9,
        description="Longest time for one evaluation; what is not finished by then counts as not scored",
    )
    stop_metric: str | None = Field(
        None,
        pattern=EVALUATION_METRIC,
        description="sampled, greedy or pass@k with k = 1, 2, 4, …: the run ends when an evaluation reaches stop_threshold in it",
    )
    stop_threshold: float | None = Field(
        None, ge=-1e6, le=1e6, description="Value of stop_metric at which the run has reached its goal"
    )

    def fault_of(self, metric: str) -> str | None:
        """Why no evaluation has this metric."""
        if metric == "sampled":
            return None
        if metric == "greedy":
            return None if self.greedy else "evaluation.greedy is false; set it to true"
        most, k = self.samples_per_prompt or 1, int(metric.partition("@")[2])
        if k < 1 or k & (k - 1):
            return "pass@k is computed for k = 1, 2, 4, …; choose one of them"
        return (
            f"evaluation.samples_per_prompt={self.samples_per_prompt} is less than k={k}; raise it"
            if k > most
            else None
        )

    @model_validator(mode="after")
    def _stops_at_what_is_measured(self) -> EvaluationConfig:
        if self.samples_per_prompt is not None and self.samples_per_prompt > self.samples:
            raise ValueError(
                f"evaluation.samples_per_prompt={self.samples_per_prompt} is more than evaluation.samples={self.samples}, which is all of an evaluation; raise the second"
            )
        if (self.stop_metric is None) != (self.stop_threshold is None):
            given, missing = ("stop_threshold", "stop_metric")[:: 1 if self.stop_metric is None else -1]
            raise ValueError(
                f"evaluation.{given}={getattr(self, given)} needs evaluation.{missing}; set both or neither"
            )
        if self.stop_metric is None:
            return self
        if self.every_steps is None:
            raise ValueError(
                f"evaluation.stop_metric={self.stop_metric} is never looked at while training goes on; set evaluation.every_steps"
            )
        if fault := self.fault_of(self.stop_metric):
            raise ValueError(f"evaluation.stop_metric={self.stop_metric} is never computed: {fault}")
        return self


class StorageConfig(Section):
    """The object store."""

    root: str = Field("./forebay-runs", min_length=1, description="Any fsspec URL or a local directory")
    options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the fsspec file system; no secrets: they end in run.json"
    )
    client: Literal["fsspec", "obstore"] = Field(
        "fsspec", description="obstore needs the extra `fast` and costs a tenth of the CPU per request"
    )


class PrometheusSink(Section):
    """The newest metrics as a page that Prometheus scrapes."""

    kind: Literal["prometheus"] = "prometheus"
    host: str = Field("127.0.0.1", description="Where the page is served; it has no authentication")
    port: int = Field(9464, ge=1, le=65535, description="Its port, on the machine of the flow")


class TensorBoardSink(Section):
    """Event files. Needs the extra `tensorboard`."""

    kind: Literal["tensorboard"] = "tensorboard"
    directory: Path = Field(
        Path("./forebay-tensorboard"), description="The event files of a run are below it, under its id"
    )


class WandbSink(Section):
    """Weights & Biases. Needs the extra `wandb`; the key comes from its own environment."""

    kind: Literal["wandb"] = "wandb"
    project: str = Field("forebay", min_length=1, description="Project that the run is filed under, by its id")


class MlflowSink(Section):
    """MLflow. Needs the extra `mlflow`; the server is that of MLFLOW_TRACKING_URI."""

    kind: Literal["mlflow"] = "mlflow"
    experiment: str = Field("forebay", min_length=1, description="Experiment that the run is filed under, by its id")


class TrackioSink(Section):
    """Trackio. Needs the extra `trackio`."""

    kind: Literal["trackio"] = "trackio"
    project: str = Field("forebay", min_length=1, description="Project that the run is filed under, by its id")


MetricSink = Annotated[
    PrometheusSink | TensorBoardSink | WandbSink | MlflowSink | TrackioSink, Field(discriminator="kind")
]


class LoggingConfig(Section):
    """What is shown and kept."""

    sinks: tuple[MetricSink, ...] = Field(
        (), description="Where metrics go beside the store, which always has them; none of them can hold up a run"
    )
    progress_seconds: float = Field(
        1.0, gt=0, le=1e9, description="Refresh of the live view and of the progress records"
    )
    artifact_seconds: float = Field(30.0, gt=0, le=1e9, description="Refresh of the Prefect artifacts")
    trainer_logprobs: bool = Field(
        True, description="Keep the trainer's own log-probs in the ledger, for `forebay trace`"
    )
