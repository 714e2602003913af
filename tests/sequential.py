"""The plain way: synchronous GRPO in one process, one loop, no scheduler, no store, no engine over HTTP.

    for each step: sample its prompts with the weights as they are → reward → advantages → one optimizer step

It says what a window of 0 must come to, bit for bit, when the engine is `tests/model_engine.py`. It shares with the
product what is not asynchronous: the prompt stream, the chat template, the objective, the model, the packing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from grpo_core.config import RunConfig
from grpo_core.objective.advantages import group_advantages
from grpo_core.objective.losses import Denominators, policy_loss
from grpo_core.prompts import PromptStream, load_splits
from grpo_core.rollout.chat import Chat
from grpo_core.seeds import derived_seed
from grpo_core.training.attention import NAME
from grpo_core.training.batch import Batch, Row
from grpo_core.training.model import Policy
from grpo_core.training.optimizer import learning_rate, make_optimizer
from grpo_core.training.packing import pack
from grpo_core.trajectory import VersionSpan
from tests.model_engine import Qwen3, Siblings

Reward = Callable[[list[list[int]]], list[float]]
CPU = torch.device("cpu")


def train(config: RunConfig, directory: Path, reward: Reward, *, steps: int) -> dict[str, Tensor]:
    """Run `steps` steps from the policy in `directory`; the tensors that a checkpoint of the last one would hold.

    `reward` takes the token ids of the completions of one group.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the trainer and the engine, which add up in one order
    try:
        return _train(config, directory, reward, steps)
    finally:
        torch.set_num_threads(threads)


def _train(config: RunConfig, directory: Path, reward: Reward, steps: int) -> dict[str, Tensor]:
    policy, optimizer = learner(config, directory)
    sampler = Sampler(config, directory)
    size = config.grpo.num_prompts_per_step
    for step in range(1, steps + 1):
        sampler.take_weights(policy)
        groups = [sampler.group(ordinal) for ordinal in range((step - 1) * size, step * size)]
        for parameters in optimizer.param_groups:
            parameters["lr"] = learning_rate(step - 1, config.grpo.max_num_steps, config.optimizer)
        learn(config, policy, optimizer, groups, [reward(completions(group)) for group in groups])
    return checkpoint_tensors(policy, optimizer)


def learner(config: RunConfig, directory: Path) -> tuple[Policy, torch.optim.Optimizer]:
    """Version 0, and what will change it."""
    language_model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation=NAME, local_files_only=True
    )
    policy = Policy(language_model, config.sampling.temperature)
    return policy, make_optimizer(policy, config.optimizer)


class Sampler:
    """The engine's model in this process, and what the generation tasks make of a prompt."""

    def __init__(self, config: RunConfig, directory: Path) -> None:
        self._config = config
        self._chat = Chat(directory, config.generation.chat_template_kwargs)
        self._model = Qwen3(directory)
        self._stream = PromptStream(load_splits(config.data).train, seed=config.data.seed, shuffle=config.data.shuffle)

    def take_weights(self, policy: Policy) -> None:
        weights = policy.language_model.named_parameters(remove_duplicate=False)
        self._model.weights = {name: weight.detach() for name, weight in weights}

    def group(self, ordinal: int) -> list[Row]:
        """The rollouts of one prompt, sampled from the weights taken last."""
        config = self._config
        prompt = self._chat.render(self._stream.prompt(ordinal).messages)
        sampling = {
            "n": config.grpo.num_generations_per_prompt,
            "seed": derived_seed(config.seed, ordinal, 0),
            "temperature": config.sampling.temperature,
            "max_tokens": config.generation.max_completion_length,
            "stop_token_ids": self._chat.stop_token_ids,
        }
        siblings = Siblings(prompt, sampling)
        while not siblings.finished:
            siblings.grow(self._model, stamp="")
        return [row(prompt, sibling.ids, sibling.logprobs) for sibling in siblings.members]


def row(prompt: list[int], output: list[int], logprobs: list[float]) -> Row:
    """One rollout as the trainer knows it."""
    length = len(prompt) + len(output)
    return Row(
        ids=np.array(prompt + output),
        generated=np.arange(length) >= len(prompt),
        logprobs=np.array([0.0] * len(prompt) + logprobs, dtype=np.float32),
        spans=(VersionSpan(attempt=1, version=0, start=len(prompt), end=length),),
    )


def completions(group: list[Row]) -> list[list[int]]:
    return [member.ids[member.generated].tolist() for member in group]


def learn(
    config: RunConfig,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    groups: list[list[Row]],
    rewards: list[list[float]],
) -> float:
    """One optimizer step on these groups; its loss."""
    # A shard keeps rewards as float32.
    advantages = group_advantages(
        np.array(rewards, dtype=np.float32),
        baseline=config.grpo.advantage_baseline,
        scale=config.grpo.advantage_scale,
    ).flatten()
    rows = [member for group in groups for member in group]
    denominators = Denominators(
        tokens=float(sum(int(each.generated.sum()) for each in rows)),
        sequences=float(len(rows)),
        constant=float(len(rows) * config.generation.max_completion_length),
    )
    total = 0.0
    packed = pack([len(each.ids) for each in rows], rows=1, token_budget=config.packing.token_budget)
    for (indices,) in packed.micro_batches:
        batch = Batch.of(
            [rows[index] for index in indices],
            [advantages[index] for index in indices],
            oldest_version=0,
            device=CPU,
        )
        scores = policy(batch.input_ids, batch.position_ids, batch.packing, at=batch.at, targets=batch.targets)
        loss, _ = policy_loss(
            scores.logprobs,
            scores.logprobs.detach(),
            batch.behaviour_logprobs,
            batch.advantages,
            batch.mask,
            batch.sequence_ids,
            config.objective,
            denominators=denominators,
            entropy=scores.entropy if config.objective.entropy_coefficient else scores.entropy.detach(),
        )
        loss.backward()
        total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(policy.parameters(), config.optimizer.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return total


def checkpoint_tensors(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and moments under the names that a checkpoint gives them."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in policy.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        moments = optimizer.state[parameter]
        tensors |= {
            f"optimizer.{name}.{moment}": value.reshape(value.shape or (1,)) for moment, value in moments.items()
        }
    return tensors
