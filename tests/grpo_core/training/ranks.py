"""Groups of trainer ranks as processes, and what they do in the tests of the step and of its checkpoints.

A server process imports the libraries once; ranks are forked from it.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from grpo_core.config import ObjectiveConfig, OptimizerConfig, RunConfig
from grpo_core.objective.losses import Denominators
from grpo_core.training import checkpoint
from grpo_core.training.batch import Batch, Row
from grpo_core.training.feed import FILLER_ROW
from grpo_core.training.lora import gather_adapters, gather_base, gather_merged
from grpo_core.training.model import Policy, load_language_model, load_policy, logprobs_of, shard
from grpo_core.training.optimizer import make_optimizer
from grpo_core.training.planning import TrainedGroup, plan_step
from grpo_core.training.reference import Reference, load_reference
from grpo_core.training.sharing import pack_groups
from grpo_core.training.step import FILLER, NonFiniteStep, Place, StepPlan, StepResult, run_step
from grpo_core.trajectory import VersionSpan

CPU = torch.device("cpu")
# A large eps makes the update a smooth function of the gradient, so that rounding stays rounding.
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, eps=1e-3, weight_decay=0.1)
MAX_GRAD_NORM = 0.5
OLDEST = 1
CONFIG = RunConfig.model_validate({"model": {"dtype": "float32"}, "sampling": {"temperature": 0.9}})
LORA: dict[str, Any] = {"rank": 4, "alpha": 16.0, "target_modules": ["q_proj", "down_proj"]}


def run(world: int, work: Callable[..., Any], *arguments: Any, deadline: float = 120) -> list[Any]:
    """What `work(*arguments)` returned on each of `world` ranks of a gloo group, whose collectives have a deadline in
    seconds; None for a rank that left without an answer."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["tests.grpo_core.training.ranks"])
    directory = Path(tempfile.mkdtemp(prefix="ranks-"))
    answers = processes.SimpleQueue()
    started = [
        processes.Process(
            target=_rank, args=(rank, world, str(directory), answers, work, arguments, deadline), daemon=True
        )
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
        return [results.get(rank) for rank in range(world)]
    finally:
        for process in started:
            process.kill()
        shutil.rmtree(directory)


def _rank(
    rank: int, world: int, directory: str, answers: Any, work: Callable[..., Any], arguments: Any, deadline: float
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/group",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=deadline),
    )
    answer = work(*arguments)
    # The parent reads only when all have ended, so an answer must fit the pipe; arrays go by file.
    answers.put((rank, answer))
    dist.destroy_process_group()


def policy_of(directory: Path) -> tuple[Policy, torch.optim.Optimizer]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = load_policy(directory, CONFIG, mesh=mesh)
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
    packed, fillers = pack_groups(
        [row.ids for row in rows], None, rows=dist.get_world_size(), token_budget=token_budget
    )
    trained = [int(row.fresh(OLDEST).sum()) for row in rows]
    advantages = [float(value) for value in np.random.default_rng(step).normal(size=len(rows))]
    sequences = float(sum(tokens > 0 for tokens in trained))
    return StepPlan(
        step=step,
        places=[Place("part", index) for index in range(len(rows))] + [FILLER] * fillers,
        advantages=advantages + [0.0] * fillers,
        micro_batches=packed.micro_batches,
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
        losses, norms, pairs, extremes, logprobs = [], [], [], [], []
        for number in (1, 2, 3):
            rows = make_rows(scenario.get("rows", 9), seed=number)
            if scenario.get("spoil_stale"):
                rows = [_with_stale_logprobs(row, scenario["spoil_stale"]) for row in rows]
            plan = make_plan(rows, number, token_budget=scenario["token_budget"])
            result = step(plan, rows, policy, optimizer, scenario.get("loss_type", "dapo"))
            losses.append(result.loss)
            norms.append(result.grad_norm)
            pairs.append(result.pairs)
            extremes.append(result.extremes)
            logprobs.append({index: values.tolist() for index, values in result.logprobs.items()})
        keep(output / f"{name}.npz", weights(policy))
        answers[name] = {
            "losses": losses,
            "norms": norms,
            "pairs": pairs,
            "extremes": extremes,
            "logprobs": logprobs,
        }
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
    """Two steps, a checkpoint in `output`/tensors and the state, by another way,
    in `output`/state.npz; a third step."""
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


def config_of(changes: dict[str, dict[str, Any]]) -> RunConfig:
    """CONFIG with these keys of its sections changed."""
    values = CONFIG.model_dump(mode="json")
    return RunConfig.model_validate(values | {name: values[name] | section for name, section in changes.items()})


def make_groups(step: int) -> list[TrainedGroup]:
    """Six groups of three sequences that begin alike; the first half of what was generated comes from version 0."""
    random = np.random.default_rng(step)
    groups = []
    for ordinal, rows in enumerate(np.array_split(np.arange(18), 6)):
        prompt = random.integers(0, 300, random.integers(3, 9)).astype(np.int32)
        members = []
        for row in make_rows(len(rows), seed=100 * step + ordinal):
            ids = np.concatenate([prompt, row.ids])
            spans = tuple(
                replace(span, start=span.start + len(prompt), end=span.end + len(prompt)) for span in row.spans
            )
            generated, logprobs = (np.concatenate([0 * prompt, part]) for part in (row.generated, row.logprobs))
            members.append(Row(ids, generated.astype(bool), logprobs.astype(np.float32), spans))
        rewards = random.normal(size=len(members)).tolist()
        advantages = (np.array(rewards) - np.mean(rewards)).tolist()
        places, positive = [Place("part", int(row)) for row in rows], [reward > 0 for reward in rewards]
        groups.append(TrainedGroup(ordinal, places, members, advantages, [True] * len(places), positive))
    return groups


def _normalised(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], norm.weight, norm.variance_epsilon)


class Learner:
    """A policy that takes whole steps of groups. `double`: everything in float64."""

    def __init__(self, directory: Path, changes: dict[str, dict[str, Any]], *, double: bool = False) -> None:
        self.config = config_of(changes)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        if double:
            language_model = load_language_model(directory, torch.float64)
            for module in language_model.modules():
                if hasattr(module, "variance_epsilon"):
                    # Its own forward rounds to float32, where a difference in the last bit becomes one of 1e-8.
                    module.forward = partial(_normalised, module)
            policy = Policy(language_model, self.config.sampling.temperature)
            self.policy = shard(policy, self.config, mesh=mesh)
        else:
            self.policy = load_policy(directory, self.config, mesh=mesh)
        self.optimizer = make_optimizer(self.policy, OPTIMIZER)
        self.reference: Reference | None = load_reference(directory, self.config, self.policy, mesh=mesh)

    def plan(self, number: int, groups: Sequence[TrainedGroup], *, learning_rate: float = 1e-2) -> StepPlan:
        return plan_step(
            number,
            groups,
            ranks=dist.get_world_size(),
            token_budget=64,
            share_prefixes=self.config.packing.share_prefixes,
            minibatches=self.config.grpo.minibatches,
            version=2,
            oldest_version=OLDEST,
            max_completion_length=16,
            learning_rate=learning_rate,
        )

    def step(self, number: int, **changes: Any) -> StepResult:
        return self.take(number, make_groups(number), **changes)

    def take(self, number: int, groups: Sequence[TrainedGroup], **changes: Any) -> StepResult:
        rows = [row for group in groups for row in group.rows]
        return run_step(
            self.plan(number, groups, **changes),
            self.policy,
            self.optimizer,
            lambda places: [FILLER_ROW if place == FILLER else rows[place.row] for place in places],
            self.config.objective,
            max_grad_norm=MAX_GRAD_NORM,
            device=CPU,
            reference=self.reference,
            router_coefficient=self.config.model.router_aux_loss_coefficient,
        )

    def logprobs(self, row: Row) -> np.ndarray:
        """Of one sequence, alone in its row; the same on every rank."""
        batch = Batch.of([row], [0.0], oldest_version=0, device=CPU)
        return logprobs_of(self.policy, batch).numpy()


def learn(directory: Path, output: Path, scenarios: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Some steps of each scenario; weights, and gradients as the optimizer saw them last, go to `output`/NAME.npz."""
    answers = {}
    for name, scenario in scenarios.items():
        learner = Learner(
            Path(scenario.get("policy", directory)), scenario.get("config", {}), double=scenario.get("double", False)
        )
        gradients: dict[str, np.ndarray] = {}

        def look(*_: Any, learner: Learner = learner, gradients: dict[str, np.ndarray] = gradients) -> None:
            for key, parameter in learner.policy.named_parameters():
                if parameter.grad is not None:
                    gradients[f"gradient.{key}"] = whole(parameter.grad)

        learner.optimizer.register_step_pre_hook(look)
        before = weights(learner.policy)
        results = [learner.step(number) for number in range(1, scenario.get("steps", 2) + 1)]
        after = weights(learner.policy)
        keep(output / f"{name}.npz", after | gradients)
        answers[name] = {
            "losses": [result.loss for result in results],
            "norms": [result.grad_norm for result in results],
            "pairs": [result.pairs for result in results],
            "extremes": [result.extremes for result in results],
            "moved": sorted(key for key in after if not np.array_equal(after[key], before[key])),
            "logprobs": {index: values.tolist() for index, values in results[0].logprobs.items()},
        }
    return answers


def untrained_updates(directory: Path) -> dict[str, Any]:
    """A step of one update, one of which nothing may be trained, and one of three updates of which the second is so:
    updates made, whether weights moved, and figures."""
    learner = Learner(directory, {"grpo": {"minibatches": 3}})
    answers: dict[str, Any] = {"made": [], "moved": [], "norms": [], "losses": []}
    for number, trained in enumerate([(0, 1), (), (0, 1, 4, 5)], start=1):
        groups = [
            replace(group, trained=[group.ordinal in trained] * len(group.places)) for group in make_groups(number)
        ]
        before = weights(learner.policy)
        result = learner.take(number, groups)
        after = weights(learner.policy)
        answers["made"].append(result.updates)
        answers["moved"].append(any(not np.array_equal(before[name], value) for name, value in after.items()))
        answers["norms"].append(result.grad_norm)
        answers["losses"].append(result.loss)
    return answers


def old_logprobs(directory: Path) -> dict[str, Any]:
    """A step of three updates: the log-probs that it reports, and those of the policy before it."""
    learner = Learner(directory, {"grpo": {"minibatches": 3}})
    rows = [row for group in make_groups(1) for row in group.rows]
    before = [learner.logprobs(row).tolist() for row in rows]
    result = learner.step(1, learning_rate=0.05)
    return {
        "before": before,
        "reported": {index: values.tolist() for index, values in result.logprobs.items()},
        "after": [learner.logprobs(row).tolist() for row in rows],
    }


def adapted(directory: Path, output: Path, lora: dict[str, Any] = LORA) -> dict[str, Any]:
    """Two steps with adapters; merged weights and adapters as they leave, and log-probs of the policy that has them."""
    learner = Learner(directory, {"model": {"lora": lora}})
    row = make_rows(1, seed=7)[0]
    for number in (1, 2):
        learner.step(number)
    first, model = dist.get_rank() == 0, learner.policy.language_model
    merged = gather_merged(model, dtype=torch.float32, device="cpu", keep=first)
    adapters = gather_adapters(model, dtype=torch.float32, device="cpu", keep=first)
    keep(output / "merged.npz", {name: tensor.numpy() for name, tensor in merged})
    factors = {f"{name}.{letter}": tensor for name, pair in adapters.items() for letter, tensor in zip("AB", pair)}
    keep(output / "adapters.npz", {name: tensor.numpy() for name, tensor in factors.items()})
    base = gather_base(model, dtype=torch.float32, device="cpu", keep=first)
    keep(output / "base.npz", {name: tensor.numpy() for name, tensor in base})
    return {"kept": [len(merged), len(adapters), len(base)], "logprobs": learner.logprobs(row).tolist()}


def leave_the_group(directory: Path, said: Path, how: str) -> str:
    """Rank 1 is gone, or stands still, when rank 0 begins a step: what rank 0 says."""
    learner = Learner(directory, {})
    if dist.get_rank() == 1:
        while how == "stands still" and not said.exists():
            time.sleep(0.1)
        os._exit(0)
    try:
        learner.step(1)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        said.touch()
    return "nothing happened"
