"""Groups of trainer ranks as processes, and what they do in the tests of the step and of its checkpoints.

A server process imports the libraries once; ranks are forked from it.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from grpo_core.config import ObjectiveConfig, OptimizerConfig
from grpo_core.objective.losses import Denominators
from grpo_core.training import checkpoint
from grpo_core.training.batch import Row
from grpo_core.training.conductor import pack_filled
from grpo_core.training.feed import FILLER_ROW
from grpo_core.training.model import Policy, load_policy
from grpo_core.training.optimizer import make_optimizer
from grpo_core.training.step import FILLER, NonFiniteStep, Place, StepPlan, run_step
from grpo_core.trajectory import VersionSpan

CPU = torch.device("cpu")
# A large eps makes the update a smooth function of the gradient, so that rounding stays rounding.
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, eps=1e-3, weight_decay=0.1)
MAX_GRAD_NORM = 0.5
OLDEST = 1


def run(world: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `work(*arguments)` returned on each of `world` ranks of a gloo group."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["tests.grpo_core.training.ranks"])
    directory = Path(tempfile.mkdtemp(prefix="ranks-"))
    answers = processes.SimpleQueue()
    started = [
        processes.Process(target=_rank, args=(rank, world, str(directory), answers, work, arguments), daemon=True)
        for rank in range(world)
    ]
    try:
        for process in started:
            process.start()
        results = {}
        for process in started:
            process.join(120)
        codes = [process.exitcode for process in started]
        assert codes == [0] * world, f"exit codes {codes}"
        while not answers.empty():
            rank, answer = answers.get()
            results[rank] = answer
        return [results[rank] for rank in range(world)]
    finally:
        for process in started:
            process.kill()
        shutil.rmtree(directory)


def _rank(rank: int, world: int, directory: str, answers: Any, work: Callable[..., Any], arguments: Any) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/group", rank=rank, world_size=world)
    answer = work(*arguments)
    # The parent reads only when all have ended, so an answer must fit the pipe; arrays go by file.
    answers.put((rank, answer))
    dist.destroy_process_group()


def policy_of(directory: Path) -> tuple[Policy, torch.optim.Optimizer]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = load_policy(directory, dtype=torch.float32, temperature=0.9, mesh=mesh, activation_checkpointing=False)
    return policy, make_optimizer(policy, OPTIMIZER)


def make_rows(count: int, seed: int) -> list[Row]:
    """Sequences of 4 to 20 tokens; the first half of what was generated comes from version 0, which is stale."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        length = int(random.integers(4, 21))
        prompt = int(random.integers(1, length - 1))
        middle = (prompt + length) // 2
        generated = np.arange(length) >= prompt
        spans = [VersionSpan(1, 0, prompt, middle)] if middle > prompt else []
        rows.append(
            Row(
                random.integers(0, 300, length).astype(np.int32),
                generated,
                np.where(generated, -random.uniform(4.5, 6.5, length), 0.0).astype(np.float32),
                (*spans, VersionSpan(1, 1, middle, length)),
            )
        )
    return rows


def make_plan(rows: Sequence[Row], step: int, *, token_budget: int) -> StepPlan:
    micro_batches, fillers = pack_filled(
        [len(row.ids) for row in rows], rows=dist.get_world_size(), token_budget=token_budget
    )
    trained = [int(row.fresh(OLDEST).sum()) for row in rows]
    advantages = [float(value) for value in np.random.default_rng(step).normal(size=len(rows))]
    sequences = float(sum(tokens > 0 for tokens in trained))
    return StepPlan(
        step=step,
        places=[Place("part", index) for index in range(len(rows))] + [FILLER] * fillers,
        advantages=advantages + [0.0] * fillers,
        micro_batches=micro_batches.micro_batches,
        oldest_version=OLDEST,
        denominators=Denominators(float(sum(trained)), sequences, sequences * 16),
        learning_rate=OPTIMIZER.learning_rate,
    )


def step(plan: StepPlan, rows: Sequence[Row], policy: Policy, optimizer: torch.optim.Optimizer, loss_type: str) -> Any:
    def at(places: Sequence[Place]) -> list[Row]:
        return [FILLER_ROW if place == FILLER else rows[place.row] for place in places]

    objective = ObjectiveConfig(loss_type=loss_type, entropy_coefficient=0.01)  # type: ignore[arg-type]
    return run_step(plan, policy, optimizer, at, objective, max_grad_norm=MAX_GRAD_NORM, device=CPU)


def whole(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone().numpy()


def weights(policy: Policy) -> dict[str, np.ndarray]:
    return {name: whole(parameter) for name, parameter in policy.named_parameters()}


def moments(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    return {
        f"{name}.{key}": whole(value)
        for name, parameter in policy.named_parameters()
        for key, value in sorted(optimizer.state[parameter].items())
    }


def keep(path: Path, arrays: dict[str, np.ndarray]) -> None:
    if dist.get_rank() == 0:
        np.savez(path, **arrays)


def differences(path: Path, found: dict[str, np.ndarray]) -> list[str]:
    """Names of the arrays that are not, bit by bit, those that were kept."""
    with np.load(path) as expected:
        return [
            name
            for name in sorted({*expected.files, *found})
            if name not in expected.files or name not in found or not np.array_equal(expected[name], found[name])
        ]


def three_steps(directory: Path, output: Path, scenarios: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Three steps of each scenario from the same weights; the weights after them go to `output`/NAME.npz."""
    answers = {}
    for name, scenario in scenarios.items():
        policy, optimizer = policy_of(directory)
        losses, norms, pairs, logprobs = [], [], [], []
        for number in (1, 2, 3):
            rows = make_rows(scenario.get("rows", 9), seed=number)
            if scenario.get("spoil_stale"):
                rows = [_with_stale_logprobs(row, scenario["spoil_stale"]) for row in rows]
            plan = make_plan(rows, number, token_budget=scenario["token_budget"])
            result = step(plan, rows, policy, optimizer, scenario.get("loss_type", "dapo"))
            losses.append(result.loss)
            norms.append(result.grad_norm)
            pairs.append(result.pairs)
            logprobs.append({index: values.tolist() for index, values in result.logprobs.items()})
        keep(output / f"{name}.npz", weights(policy))
        answers[name] = {"losses": losses, "norms": norms, "pairs": pairs, "logprobs": logprobs}
    return answers


def _with_stale_logprobs(row: Row, value: float) -> Row:
    return replace(row, logprobs=np.where(row.generated & ~row.fresh(OLDEST), value, row.logprobs).astype(np.float32))


def bad_step(directory: Path) -> dict[str, Any]:
    """A step with an infinite advantage, then a good one."""
    policy, optimizer = policy_of(directory)
    rows = make_rows(6, seed=1)
    before = weights(policy)
    plan = make_plan(rows, 1, token_budget=64)
    message = ""
    try:
        step(replace(plan, advantages=[float("inf"), *plan.advantages[1:]]), rows, policy, optimizer, "dapo")
    except NonFiniteStep as error:
        message = str(error)
    untouched = all(np.array_equal(before[name], value) for name, value in weights(policy).items())
    good = step(plan, rows, policy, optimizer, "dapo")
    moved = any(not np.array_equal(before[name], value) for name, value in weights(policy).items())
    return {"message": message, "untouched": untouched, "moved": moved, "loss": good.loss}


def save(directory: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    checkpoint.write(directory, checkpoint.tensors_of(policy, optimizer))


def save_after_steps(directory: Path, output: Path) -> dict[str, Any]:
    """Two steps, a checkpoint in `output`/tensors and the state, by another way, in `output`/state.npz; a third step."""
    policy, optimizer = policy_of(directory)
    for number in (1, 2):
        rows = make_rows(6, seed=number)
        step(make_plan(rows, number, token_budget=64), rows, policy, optimizer, "dapo")
    save(output / "tensors", policy, optimizer)
    keep(output / "state.npz", weights(policy) | moments(policy, optimizer))
    return {"next": _third_step(policy, optimizer)}


def save_untouched(directory: Path, output: Path) -> None:
    save(output / "tensors", *policy_of(directory))


def load_and_compare(directory: Path, saved: list[Path]) -> dict[str, Any]:
    """Load each checkpoint and compare it, bit by bit, with the state that was saved beside it."""
    answers = {}
    for path in saved:
        policy, optimizer = policy_of(directory)
        checkpoint.load(path / "tensors", policy, optimizer)
        different = differences(path / "state.npz", weights(policy) | moments(policy, optimizer))
        answers[path.name] = {"different": different, "next": _third_step(policy, optimizer)}
    return answers


def _third_step(policy: Policy, optimizer: torch.optim.Optimizer) -> list[float]:
    rows = make_rows(6, seed=3)
    result = step(make_plan(rows, 3, token_budget=64), rows, policy, optimizer, "dapo")
    return [result.loss, result.grad_norm]
