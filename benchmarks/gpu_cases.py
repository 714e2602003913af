"""The cases of gpu_check.py: training steps of random models, and log-probs of random hidden states.

Contract: functions of sizes and a device that return figures by name; what goes wrong is raised.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.logprobs import fused, plain
from grpo_core.training.attention import NAME
from grpo_core.training.batch import Row
from grpo_core.training.flops import ModelShape, peak_flops, step_flops, utilisation
from grpo_core.training.model import Policy, layers_of, shard
from grpo_core.training.optimizer import make_optimizer
from grpo_core.training.planning import TrainedGroup, plan_step
from grpo_core.training.step import Place, StepPlan, run_step
from grpo_core.trajectory import VersionSpan

GROUP = 8
Case = dict[str, Any]
Trainee = tuple[Policy, torch.optim.Optimizer]

# The run config's defaults as plain values: the config itself needs a package that a bare machine lacks.
OBJECTIVE = SimpleNamespace(
    loss_type="dapo",
    ratio_level=None,
    epsilon=0.2,
    epsilon_high=None,
    dual_clip=None,
    proximal_policy="recomputed",
    force_on_policy_ratio=False,
    beta=0.0,
    kl_type="k3",
    kl_placement="loss",
    kl_importance_weight=False,
    kl_input_clamp=20.0,
    kl_output_clamp=10.0,
    entropy_coefficient=0.0,
    positive_nll_weight=0.0,
    importance_correction="token",
    importance_mode="truncate",
    importance_cap=2.0,
    importance_floor=None,
    sequence_error_threshold=None,
)
OPTIMIZER = SimpleNamespace(learning_rate=1e-6, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
TRAINING = SimpleNamespace(torch_compile=False, cpu_offload=False)
TEMPERATURE = 1.0


@dataclass(frozen=True, slots=True)
class Size:
    """What is measured: models by name, tokens of a row, (tokens, width, vocabulary) of the log-probs that are timed,
    and of those that are held against float64."""

    models: dict[str, dict[str, Any]]
    rows: tuple[int, ...]
    logprobs: tuple[tuple[int, int, int], ...]
    errors: tuple[int, int, int]
    repeats: int


QWEN3 = {"vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8, "tie_word_embeddings": True}
FULL = Size(
    models={
        "0.6B": QWEN3
        | {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072},
        "4B": QWEN3
        | {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 9728},
    },
    rows=(8192, 32768),
    logprobs=((8192, 1024, 151_936), (8192, 2560, 151_936)),
    errors=(1024, 1024, 151_936),
    repeats=3,
)
TINY = Size(
    models={
        "tiny": {
            "vocab_size": 512,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 96,
        }
    },
    rows=(256,),
    logprobs=((64, 32, 1000),),
    errors=(64, 32, 1000),
    repeats=1,
)


def free(device: torch.device) -> None:
    """Give back what the case before held, so that it is not counted as the next one's."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def alone_in_a_group(device: torch.device) -> Iterator[None]:
    """A process group of one, as the step expects; an existing one is used as it is."""
    if dist.is_initialized():
        yield
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_trainee(sizes: dict[str, Any], longest: int, device: torch.device) -> Trainee:
    """A random policy with float32 master weights that computes in bfloat16 on a GPU and recomputes activations, for
    rows of at most `longest` tokens, and its optimizer."""
    config = Qwen3Config(**sizes, max_position_embeddings=longest)
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers_of(model):
        layer.training = True
    run = SimpleNamespace(model=SimpleNamespace(dtype=dtype), training=TRAINING)
    policy = shard(Policy(model.float(), TEMPERATURE), run, mesh=init_device_mesh(device.type, (1,)))
    return policy, make_optimizer(policy, OPTIMIZER)


def make_groups(tokens: int, vocabulary: int) -> list[TrainedGroup]:
    """Groups of GROUP sequences that fill one row of `tokens` tokens; half of each sequence is the group's prompt."""
    random = np.random.default_rng(0)
    length = max(4, min(tokens // (2 * GROUP), 2048))
    count = max(1, tokens // (length * GROUP))
    groups = []
    for ordinal in range(count):
        prompt = random.integers(0, vocabulary, length // 2)
        rows = []
        for _ in range(GROUP):
            ids = np.concatenate([prompt, random.integers(0, vocabulary, length - len(prompt))]).astype(np.int32)
            generated = np.arange(length) >= len(prompt)
            logprobs = np.where(generated, -np.log(vocabulary), 0.0).astype(np.float32)
            rows.append(Row(ids, generated, logprobs, (VersionSpan(1, 0, len(prompt), length),)))
        advantages = random.normal(size=GROUP).tolist()
        places = [Place("part", ordinal * GROUP + member) for member in range(GROUP)]
        groups.append(
            TrainedGroup(ordinal, places, rows, advantages, [True] * len(rows), [value > 0 for value in advantages])
        )
    return groups


def make_plan(groups: list[TrainedGroup], tokens: int, share_prefixes: bool) -> StepPlan:
    return plan_step(
        1,
        groups,
        ranks=1,
        token_budget=tokens,
        share_prefixes=share_prefixes,
        minibatches=1,
        version=0,
        oldest_version=0,
        max_completion_length=tokens,
        learning_rate=0.0,  # so that every case has the same loss
    )


def measure_step(trainee: Trainee, tokens: int, share: bool, device: torch.device, repeats: int) -> Case:
    """One step to warm up, then `repeats` more; the median counts."""
    policy, optimizer = trainee
    config = policy.language_model.config
    groups = make_groups(tokens, config.vocab_size)
    plan = make_plan(groups, tokens, share)
    rows = [row for group in groups for row in group.rows]

    def step() -> Any:
        return run_step(
            plan,
            policy,
            optimizer,
            lambda places: [rows[place.row] for place in places],
            OBJECTIVE,
            max_grad_norm=1.0,
            device=device,
        )

    first = step()
    seconds, memory = timed(step, device, repeats)
    lengths = [len(row.ids) for row in rows]
    flops = step_flops(ModelShape.of(config), lengths, sum(int(row.generated.sum()) for row in rows))
    saved, total = first.pairs["prefix_tokens_saved"]
    figures = {
        "tokens": sum(lengths),
        "tokens_forwarded": int(total - saved),
        "micro_batches": len(plan.micro_batches),
        "loss": first.loss,
        "seconds": seconds,
        "tokens_per_second": sum(lengths) / seconds,
        **memory,
    }
    peak = peak_flops(torch.cuda.get_device_name()) if device.type == "cuda" else None
    if peak is not None:
        used = utilisation(flops, wall_seconds=seconds, busy_seconds=seconds, peak_flops=peak, devices=1)
        figures["mfu"] = used.of_busy
    return figures


def timed(work: Callable[[], Any], device: torch.device, repeats: int) -> tuple[float, dict[str, int]]:
    """(median seconds of a call, bytes held before it and at its peak; nothing of that on a CPU)."""
    cuda = device.type == "cuda"
    taken = []
    before = 0
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    memory = {"held_bytes": before, "peak_bytes": torch.cuda.max_memory_allocated()} if cuda else {}
    return statistics.median(taken), memory


def dtypes(device: torch.device) -> list[torch.dtype]:
    """What the log-probs are tried in."""
    return [torch.float32, torch.bfloat16] if device.type == "cuda" else [torch.float32]


def shape(sizes: tuple[int, int, int]) -> Case:
    return dict(zip(("tokens", "width", "vocabulary"), sizes, strict=True))


def draw(
    sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, targets and the gradients of the log-probs."""
    torch.manual_seed(0)
    tokens, width, vocabulary = sizes
    hidden = torch.randn(tokens, width, device=device).to(dtype)
    weight = (torch.randn(vocabulary, width, device=device) / width**0.5).to(dtype)
    targets = torch.randint(vocabulary, (tokens,), device=device)
    return hidden, weight, targets, torch.randn(tokens, device=device)


WAYS = {"plain": plain, "fused": fused}


def value_and_gradients(
    way: str, hidden: Tensor, weight: Tensor, targets: Tensor, upstream: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    value = WAYS[way](*inputs, targets)
    return value.detach(), *torch.autograd.grad((value * upstream).sum(), inputs)


def time_logprobs(sizes: tuple[int, int, int], device: torch.device, repeats: int) -> Case:
    """Forward and backward, from bfloat16 inputs on a GPU. A way that does not fit the memory leaves the other."""
    inputs = draw(sizes, dtypes(device)[-1], device)
    case: Case = {}
    for way in WAYS:
        try:
            value_and_gradients(way, *inputs)
            seconds, memory = timed(lambda way=way: value_and_gradients(way, *inputs), device, repeats)
            case[way] = {"seconds": seconds, **memory}
        except torch.OutOfMemoryError as error:
            case[way] = {"failed": str(error).splitlines()[0]}
        free(device)
    return case


def errors_of_logprobs(sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Case:
    """Both ways beside float64: the largest difference over the largest value, of value and gradients."""
    hidden, weight, targets, upstream = draw(sizes, dtype, device)
    exact = value_and_gradients("plain", hidden.double(), weight.double(), targets, upstream.double())
    case: Case = {}
    for way in WAYS:
        measured = value_and_gradients(way, hidden, weight, targets, upstream)
        case[way] = {
            name: float((ours.double() - theirs).abs().max() / theirs.abs().max())
            for name, ours, theirs in zip(("value", "hidden_gradient", "weight_gradient"), measured, exact, strict=True)
        }
    return case
