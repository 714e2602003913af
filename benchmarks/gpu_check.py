"""What one GPU makes of the trainer's own arithmetic: `python -m benchmarks.gpu_check [-o FILE] [--tiny]`.

Needs torch and transformers, no engine, no weights and no network. Random models of the shapes of Qwen3-0.6B and
Qwen3-4B take packed training steps at 8k and 32k tokens, with shared prefixes and without; the fused log-probs are
held against the plain way. `--tiny` takes models and rows that a CPU manages in seconds.

Writes one JSON object: `device`, `steps` (tokens per second, model FLOPs utilisation, peak memory of a step) and
`logprobs` (largest difference of value and gradient over the largest value, seconds and peak bytes of both ways). A
case that does not fit the device's memory says so and the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, Qwen3Config

from grpo_core.config import ObjectiveConfig, OptimizerConfig, RunConfig
from grpo_core.objective.logprobs import token_logprobs
from grpo_core.training.attention import NAME
from grpo_core.training.batch import Row
from grpo_core.training.flops import ModelShape, peak_flops, step_flops, utilisation
from grpo_core.training.model import Policy, layers_of, shard
from grpo_core.training.optimizer import make_optimizer
from grpo_core.training.planning import TrainedGroup, plan_step
from grpo_core.training.step import Place, StepPlan, run_step
from grpo_core.trajectory import VersionSpan

GROUP = 8


@dataclass(frozen=True, slots=True)
class Size:
    """What is measured: models by name, tokens of a row, and (tokens, width, vocabulary) of the log-probs."""

    models: dict[str, dict[str, Any]]
    rows: tuple[int, ...]
    logprobs: tuple[tuple[int, int, int], ...]
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
    repeats=1,
)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure everything, write it and return it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="where to write the JSON; default: standard output")
    parser.add_argument("--tiny", action="store_true", help="small models and rows, for a CPU")
    parser.add_argument("--models", nargs="*", help="only these models")
    chosen = parser.parse_args(arguments)
    size = TINY if chosen.tiny else FULL
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    with alone_in_a_group(device):
        found = {
            "device": name,
            "torch": torch.__version__,
            "logprobs": [compare_logprobs(*case, device, size.repeats) for case in size.logprobs],
            "steps": [
                row
                for model in chosen.models or size.models
                for row in measure_model(model, size.models[model], size, device, peak_flops(name))
            ],
        }
    text = json.dumps(found, indent=1)
    if chosen.output is None:
        print(text)
    else:
        chosen.output.write_text(text + "\n", encoding="utf-8")
    return found


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


def measure_model(
    name: str, sizes: dict[str, Any], size: Size, device: torch.device, peak: float | None
) -> list[dict[str, Any]]:
    """Steps of one model at every row length, with shared prefixes and without."""
    config = Qwen3Config(**sizes, max_position_embeddings=max(size.rows))
    policy, run = make_policy(config, device)
    optimizer = make_optimizer(policy, OptimizerConfig())
    rows = []
    for tokens in size.rows:
        groups = make_groups(tokens, config.vocab_size)
        for share in (False, True):
            case: dict[str, Any] = {"model": name, "row_tokens": tokens, "share_prefixes": share}
            plan = make_plan(groups, tokens, share)
            try:
                case |= measure_step(plan, groups, policy, optimizer, run, device, size.repeats, peak)
            except torch.OutOfMemoryError as error:
                case["failed"] = str(error).splitlines()[0]
                optimizer.zero_grad(set_to_none=True)
            rows.append(case)
    return rows


def make_policy(config: Qwen3Config, device: torch.device) -> tuple[Policy, RunConfig]:
    """A random policy with float32 master weights that computes in bfloat16 on a GPU, and recomputes activations."""
    run = RunConfig.model_validate({"model": {"dtype": "bfloat16" if device.type == "cuda" else "float32"}})
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers_of(model):
        layer.training = True
    policy = Policy(model.float(), run.sampling.temperature)
    return shard(policy, run, mesh=init_device_mesh(device.type, (1,))), run


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


def measure_step(
    plan: StepPlan,
    groups: list[TrainedGroup],
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    run: RunConfig,
    device: torch.device,
    repeats: int,
    peak: float | None,
) -> dict[str, Any]:
    """One step to warm up, then `repeats` more; the median counts."""
    rows = [row for group in groups for row in group.rows]

    def step() -> Any:
        return run_step(
            plan,
            policy,
            optimizer,
            lambda places: [rows[place.row] for place in places],
            ObjectiveConfig(),
            max_grad_norm=1.0,
            device=device,
        )

    first = step()
    seconds, memory = timed(step, device, repeats)
    lengths = [len(row.ids) for row in rows]
    flops = step_flops(
        ModelShape.of(policy.language_model.config), lengths, sum(int(row.generated.sum()) for row in rows)
    )
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
    if peak is not None:
        share = utilisation(flops, wall_seconds=seconds, busy_seconds=seconds, peak_flops=peak, devices=1)
        figures["mfu"] = share.of_busy
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


def compare_logprobs(tokens: int, width: int, vocabulary: int, device: torch.device, repeats: int) -> dict[str, Any]:
    """The fused log-probs beside logits, log-softmax and gather in float32, from the same bfloat16 inputs on a GPU."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden = torch.randn(tokens, width, device=device, dtype=dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width, device=device) / width**0.5).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=device)
    upstream = torch.randn(tokens, device=device)

    def plain() -> Tensor:
        logits = hidden.float() @ weight.float().T
        return torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]

    def fused() -> Tensor:
        return token_logprobs(hidden, weight, targets)[0]

    case: dict[str, Any] = {"tokens": tokens, "width": width, "vocabulary": vocabulary}
    results = {}
    for name, way in (("plain", plain), ("fused", fused)):

        def forward_and_backward(way: Callable[[], Tensor] = way) -> tuple[Tensor, Tensor, Tensor]:
            value = way()
            gradients = torch.autograd.grad((value * upstream).sum(), (hidden, weight))
            return value.detach(), *gradients

        try:
            results[name] = forward_and_backward()
            seconds, memory = timed(forward_and_backward, device, repeats)
            case[name] = {"seconds": seconds, **memory}
        except torch.OutOfMemoryError as error:
            case[name] = {"failed": str(error).splitlines()[0]}
    if len(results) == 2:
        for label, ours, theirs in zip(
            ("value", "hidden_gradient", "weight_gradient"), results["fused"], results["plain"], strict=True
        ):
            case[f"{label}_difference"] = float(
                (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
            )
    return case


if __name__ == "__main__":
    main()
