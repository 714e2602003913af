"""A calculator, called by a policy on a real vLLM engine: two turns, trained tokens exactly the generated ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from grpo_core.config import ToolFunction
from grpo_core.recipe import parse
from grpo_core.refit.control import EngineAddress
from grpo_core.refit.coordinator import refit_weights
from grpo_core.refit.gloo import GlooTransfer
from grpo_core.rollout.chat import Chat
from grpo_core.rollout.group import Generator
from grpo_core.rollout.pool import Pool
from grpo_core.rollout.rewards import Scores
from grpo_core.rollout.rows import OK
from grpo_core.rollout.tools import Toolbox
from grpo_core.trajectory import Prompt, Stamp
from tests.grpo_core import tiny
from tests.grpo_core.refit.real import SETTINGS, canary_of, logprobs_of, weights_of
from tests.grpo_core.rollout import templates
from tests.vllm_engine import CONTEXT, RunningEngine, running_engines

pytestmark = pytest.mark.vllm

CALCULATOR = "tests.grpo_core.rollout.sample_tools:calculator"
SUMS = [(1, 2), (3, 4), (2, 2), (5, 1)]
STEPS = 160


def question(a: int, b: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"What is {a} plus {b}?"}]


def demonstration(chat: Chat, schemas: tuple[dict[str, Any], ...], a: int, b: int) -> tuple[list[int], list[int]]:
    """The ids of a whole conversation with one call, and what is to be learnt of them (-100: nothing)."""
    end = list(chat.stop_token_ids[:1])
    call = f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{a}+{b}"}}}}</tool_call>'
    first = chat.prompt(question(a, b), schemas)
    said = chat._encoded(call) + end
    tool = {"role": "tool", "content": str(a + b)}
    answered = [*question(a, b), {"role": "assistant", "content": call}]
    second = chat.next_prompt(first, said, answered, [tool], schemas)
    result = chat._encoded(str(a + b)) + end
    added = second.ids[len(first.ids) + len(said) :]
    return (
        [*first.ids, *said, *added, *result],
        [-100] * len(first.ids) + said + [-100] * len(added) + result,
    )


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny policy that was shown how to call the calculator."""
    from transformers import AutoModelForCausalLM

    directory = tiny.make(tmp_path_factory.mktemp("policy") / "tiny", max_position_embeddings=CONTEXT)
    (directory / "chat_template.jinja").write_text(templates.TOOLS)
    chat = Chat(directory, {})
    schemas = Toolbox.of([ToolFunction(function=CALCULATOR)], timeout_seconds=5).schemas
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    shown = [demonstration(chat, schemas, a, b) for a, b in SUMS]
    longest = max(len(ids) for ids, _ in shown)
    ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in shown])
    labels = torch.tensor([wanted + [-100] * (longest - len(wanted)) for _, wanted in shown])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(ids, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def engine(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    with running_engines([policy], tmp_path_factory.mktemp("engine")) as engines:
        yield engines[0]


class Rewards:
    """One for every rollout."""

    def submit(self, **call: Any) -> Future[Scores]:
        answer: Future[Scores] = Future()
        answer.set_result(Scores({}, [1.0] * len(call["prompts"])))
        return answer


def test_a_calculator_is_called_and_the_log_probs_of_both_turns_are_the_models_own(
    policy: Path, engine: RunningEngine
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    address = EngineAddress("e0", engine.url)
    refit_weights(weights_of(model), [address], Stamp(1, 0), GlooTransfer(), SETTINGS, canary=canary_of(model))
    config = parse(
        {
            "run_id": "tools",
            "model": {"context_length": 512},
            "grpo": {"num_generations_per_prompt": 4},
            "generation": {"max_completion_length": 128, "tools": [CALCULATOR], "max_tool_calling_iterations": 2},
        },
        where="test",
    )
    pool = Pool()
    pool.join("e0", engine.url)
    pool.live(Stamp(1, 0), ("e0",))
    chat = Chat(policy, {})
    generator = Generator(config, chat, pool, Rewards())  # type: ignore[arg-type]

    async def groups() -> list[list[dict[str, Any]]]:
        async with aiohttp.ClientSession() as session:
            prompts = [Prompt(n, 0, n, question(a, b)) for n, (a, b) in enumerate(SUMS)]
            return await asyncio.gather(*(generator.group(prompt, session, attempt=1, lease=0) for prompt in prompts))

    calls = 0
    for (a, b), rows in zip(SUMS, asyncio.run(groups()), strict=True):
        for row in rows:
            assert row["status"] == OK, row["error"]
            generated = [position for position, made in enumerate(row["loss_mask"]) if made]
            own = logprobs_of(model, row["token_ids"])
            assert max(abs(row["logprobs"][position] - own[position - 1]) for position in generated) <= 1e-4
            spans = [position for span in row["version_spans"] for position in range(span["start"], span["end"])]
            assert spans == generated
            if row["tool_calls"] and not row["tool_failures"]:
                calls += 1
                text = "".join(chat.pieces(row["token_ids"]))
                assert f'"expression": "{a}+{b}"' in text and f"tool\n{a + b}<|im_end|>" in text
                assert row["turns"] == 2 and row["joins_clean"] == 1 and row["joins_realign"] == row["joins_fork"] == 0
    assert calls >= 12
