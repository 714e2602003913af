"""A short supervised phase, so that reinforcement starts from a policy that is sometimes right.

Contract: demonstrations are rendered exactly as rollouts are (the same chat template, the same end-of-message token),
and only the tokens a rollout would generate are learned. `run` depends on its arguments alone, so its output may be
cached by their content; it counts steps, never seconds. The output directory appears complete or not at all.

Demonstrations may be wrong on purpose. What reinforcement does in minutes is sharpen: a policy that imitates a
mixture of right answers and slips knows how to be right, but is so only part of the time, and the reward tells it
which part to keep.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from grpo_core.training.origin import completed

Message = dict[str, str]
Demonstration = tuple[list[Message], str]
Example = tuple[list[int], list[int]]  # prompt ids, completion ids

IGNORED = -100  # the label that cross_entropy leaves out
RAMP_SHARE = 1 / 15  # of all steps, spent raising the learning rate
FINAL_SHARE = 0.05  # of the learning rate, left at the last step
MAX_GRADIENT_NORM = 1.0
BETAS = (0.9, 0.98)
CURVE_POINTS = 20


class WarmStartError(ValueError):
    """The demonstrations or settings cannot be used."""


def demonstrations(entries: Iterable[Mapping[str, Any]], *, wrong_share: float, seed: int) -> list[Demonstration]:
    """Question and answer of each entry; with probability `wrong_share` the answer is one too high.

    The slip stays the same on purpose: to make it, a policy must know the right answer. Answers drawn at random
    instead teach little beyond which answers are common. Raises WarmStartError for an answer that is no number.
    """
    rng = random.Random(seed)
    return [
        (
            [{"role": "user", "content": entry["question"]}],
            one_too_high(entry["answer"]) if rng.random() < wrong_share else entry["answer"],
        )
        for entry in entries
    ]


def one_too_high(answer: str) -> str:
    """Raise WarmStartError when `answer` is no number."""
    try:
        return str(Decimal(answer) + 1)
    except InvalidOperation:
        raise WarmStartError(
            f"answer {answer!r} is not a number, so no slip can be made; set wrong_share to 0"
        ) from None


def run(
    policy_dir: Path,
    output_dir: Path,
    demonstrations: Sequence[Demonstration],
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    threads: int,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train the policy of `policy_dir` on the demonstrations with AdamW and save it, with tokenizer, to `output_dir`.

    Returns `steps`, `tokens` (learned), `seconds` (wall time) and `loss`, a curve of [step, mean loss in nats per
    token since the point before]. When `output_dir` is complete already, nothing is done and the curve is empty.
    """
    if not demonstrations:
        raise WarmStartError("no demonstrations to learn from; give the train split at least one entry")
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    started = time.perf_counter()
    loss: list[list[float]] = []
    tokens = 0
    try:
        with completed(output_dir) as unfinished:
            if unfinished is not None:
                tokenizer = AutoTokenizer.from_pretrained(policy_dir)
                model = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32).train()
                examples = [encode(tokenizer, *demonstration) for demonstration in demonstrations]
                batches = shuffled(examples, batch_size=batch_size, seed=seed)
                for step, mean_loss, learned in _descend(model, batches, steps=steps, learning_rate=learning_rate):
                    tokens = learned
                    loss.append([step, mean_loss])
                    report(f"warm start: step {step}/{steps}, loss {mean_loss:.3f}, {_since(started):.0f} s")
                model.save_pretrained(unfinished)
                tokenizer.save_pretrained(unfinished)
    finally:
        torch.set_num_threads(threads_before)
    return {"steps": steps, "tokens": tokens, "seconds": _since(started), "loss": loss}


def encode(tokenizer: PreTrainedTokenizerBase, messages: list[Message], answer: str) -> Example:
    """Prompt ids as a rollout would send them, and the completion ids, end-of-message token included."""
    prompt_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return list(prompt_ids), [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]


def shuffled(examples: Sequence[Example], *, batch_size: int, seed: int) -> Iterator[list[Example]]:
    """Endless batches; each pass over the examples has its own order, and batches run on across passes."""
    rng = random.Random(seed)
    queue: list[Example] = []
    while True:
        while len(queue) < batch_size:
            queue += rng.sample(examples, len(examples))
        yield queue[:batch_size]
        queue = queue[batch_size:]


def collate(batch: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and labels, both int64 [rows, longest - 1]; labels are shifted and ignore prompt and padding."""
    width = max(len(prompt) + len(completion) for prompt, completion in batch) - 1
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    labels = torch.full((len(batch), width), IGNORED)
    for row, (prompt, completion) in enumerate(batch):
        tokens = torch.tensor([*prompt, *completion])
        ids[row, : len(tokens) - 1] = tokens[:-1]
        labels[row, len(prompt) - 1 : len(tokens) - 1] = tokens[len(prompt) :]
    return ids, labels


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear ramp, then half a cosine down to FINAL_SHARE. `step` counts from 0."""
    ramp = max(1, round(steps * RAMP_SHARE))
    cosine = (1 + math.cos(math.pi * step / steps)) / 2
    return min(1.0, (step + 1) / ramp) * (FINAL_SHARE + (1 - FINAL_SHARE) * cosine)


def _descend(
    model: PreTrainedModel, batches: Iterator[list[Example]], *, steps: int, learning_rate: float
) -> Iterator[tuple[int, float, int]]:
    """Yield (step, mean loss since the yield before, tokens learned so far) about CURVE_POINTS times."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=BETAS, weight_decay=0.0)
    interval = max(1, steps // CURVE_POINTS)
    losses: list[float] = []
    learned = 0
    for step in range(1, steps + 1):
        ids, labels = collate(next(batches))
        learn = labels != IGNORED
        for parameters in optimizer.param_groups:
            parameters["lr"] = learning_rate * learning_rate_factor(step - 1, steps)
        # No attention mask: padding is on the right, where causal attention never looks from a token that counts.
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        logits = model.get_output_embeddings()(hidden[learn])  # type: ignore[no-untyped-call]
        loss = cross_entropy(logits, labels[learn])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()
        learned += int(learn.sum())
        losses.append(loss.item())
        if step % interval == 0 or step == steps:
            yield step, sum(losses) / len(losses), learned
            losses = []


def _since(started: float) -> float:
    return time.perf_counter() - started
