"""Groups whose rollouts have several turns: on engines that are told what to say, with tools and environments."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import aiohttp
import pytest

from grpo_core.config import RunConfig
from grpo_core.recipe import parse
from grpo_core.rollout import turns
from grpo_core.rollout.chat import Chat
from grpo_core.rollout.group import Generator
from grpo_core.rollout.pool import NoEngine, Pool
from grpo_core.rollout.rewards import Scores
from grpo_core.rollout.rows import FAILED, OK
from grpo_core.trajectory import Prompt, Stamp
from storage import schema
from tests.fake_engine import GENERATE, FakeEngine, Fault
from tests.grpo_core import tiny
from tests.grpo_core.rollout import templates
from tests.grpo_core.rollout.sample_environments import Counting
from tests.grpo_core.rollout.templates import chat_with, spelled

SAMPLES = "tests.grpo_core.rollout"
CALCULATOR = f"{SAMPLES}.sample_tools:calculator"
SIZE = 4

Say = Callable[[str, int], str]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    policy = tiny.make(tmp_path_factory.mktemp("policy") / "tiny")
    return chat_with(policy, tmp_path_factory.mktemp("chat") / "chat", templates.TOOLS)


@pytest.fixture
def engines() -> Iterator[list[FakeEngine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(FakeEngine(version="1.4")) for _ in range(2)]


@pytest.fixture(autouse=True)
def _none_made_and_no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    Counting.made.clear()
    sleep = asyncio.sleep
    monkeypatch.setattr(turns.asyncio, "sleep", lambda seconds: sleep(min(seconds, 0.01)))


class Rewards:
    """One for every rollout, and what it was asked."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def submit(self, **call: Any) -> Future[Scores]:
        self.calls.append(call)
        answer: Future[Scores] = Future()
        answer.set_result(Scores({"m:f": [1.0] * len(call["prompts"])}, [1.0] * len(call["prompts"])))
        return answer


def config(environment: dict[str, Any] | None = None, **generation: Any) -> RunConfig:
    values = {
        "run_id": "r",
        "grpo": {"num_generations_per_prompt": SIZE},
        "generation": {"max_completion_length": 200, "request_timeout_seconds": 5, **generation},
        "model": {"context_length": 1024},
        "pool": {"kind": "local", "start_timeout_seconds": 1},
        "environment": environment or {"kind": "none"},
    }
    return parse(values, where="test")


def counting(**arguments: Any) -> dict[str, Any]:
    return {
        "kind": "python",
        "factory": f"{SAMPLES}.sample_environments:Counting",
        "arguments": arguments,
        "instances": SIZE,
        "timeout_seconds": 5,
        "reward_weight": 2.0,
    }


def prompt(**columns: Any) -> Prompt:
    return Prompt(5, 0, 3, [{"role": "user", "content": "What is 1 plus 2?"}], columns)


def make(
    chat: Chat,
    engines: list[FakeEngine],
    say: Say,
    settings: RunConfig,
    asked: Prompt,
    rewards: Rewards | None = None,
    pool: Pool | None = None,
) -> list[dict[str, Any]]:
    """The group of `asked` on engines that say what `say` says to the text of a prompt, as choice i."""
    pool = pool or Pool()
    for number, engine in enumerate(engines):
        engine.script = lambda ids, index: spelled(chat, say("".join(chat.pieces(ids)), index))
        pool.join(f"e{number}", engine.url)
    pool.live(Stamp(1, 4), tuple(f"e{number}" for number in range(len(engines))))
    generator = Generator(settings, chat, pool, rewards or Rewards())  # type: ignore[arg-type]

    async def run() -> list[dict[str, Any]]:
        try:
            async with aiohttp.ClientSession() as session:
                return await generator.group(asked, session, attempt=1, lease=0)
        finally:
            await generator.close()
            assert pool.load() == 0 and all(instance.closed for instance in Counting.made)

    rows = asyncio.run(run())
    assert schema.table([{"attempt": 1, "lease": 0, "part": 0, **row} for row in rows], schema.SHARD).num_rows
    return rows


def calculates(text: str, index: int) -> str:
    """Calls the calculator about what it was asked, then says the result."""
    result = re.search(r"tool\n(\d+)", text)
    if result is not None:
        return result[1]
    return f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{index}+1"}}}}</tool_call>'


def requests(engines: list[FakeEngine]) -> list[dict[str, Any]]:
    return [body for engine in engines for path, body in engine.bodies if path == GENERATE]


def test_a_tool_is_called_and_exactly_the_generated_tokens_are_trained(chat: Chat, engines: list[FakeEngine]) -> None:
    rewards = Rewards()
    rows = make(chat, engines, calculates, config(tools=[CALCULATOR]), prompt(answer="3"), rewards)
    assert [row["rollout"] for row in rows] == list(range(SIZE))
    for row in rows:
        said = [spelled(chat, calculates("", row["rollout"])), spelled(chat, str(row["rollout"] + 1))]
        trained = [token for token, mask in zip(row["token_ids"], row["loss_mask"], strict=True) if mask]
        assert trained == said[0] + said[1]
        starts = [(span["start"], span["end"]) for span in row["version_spans"]]
        assert [row["token_ids"][start:end] for start, end in starts] == said
        assert all((value != 0.0) == mask for value, mask in zip(row["logprobs"], row["loss_mask"], strict=True))
        assert (row["turns"], row["tool_calls"], row["tool_failures"], row["finish_reason"]) == (2, 1, 0, "stop")
        assert [(use["name"], use["calls"], use["failures"]) for use in row["tool_usage"]] == [("calculator", 1, 0)]
        assert 0 < row["tool_usage"][0]["seconds"] <= row["tool_seconds"] and row["tool_rounds"] == 1
        joins = ("joins_clean", "joins_realign", "joins_fork", "drift_tokens", "drift_max")
        assert [row[name] for name in joins] == [1, 0, 0, 0, 0]
    (call,) = rewards.calls
    assert [completion[-1]["content"] for completion in call["completions"]] == ["1", "2", "3", "4"]
    assert [[message["role"] for message in asked] for asked in call["prompts"]] == [["user"]] * SIZE
    assert call["columns"] == {"answer": ["3"] * SIZE}


def test_siblings_share_their_first_turn_and_go_on_alone_with_seeds_of_their_own(
    chat: Chat, engines: list[FakeEngine]
) -> None:
    make(chat, engines, calculates, config(tools=[CALCULATOR]), prompt())
    sampling = sorted((body["sampling_params"] for body in requests(engines)), key=lambda each: -each["n"])
    assert [each["n"] for each in sampling] == [SIZE] + [1] * SIZE
    assert len({each["seed"] for each in sampling}) == 1 + SIZE
    assert len({body["request_id"] for body in requests(engines)}) == 1 + SIZE
    again = sorted(each["seed"] for each in sampling)
    for engine in engines:
        engine.bodies.clear()
    make(chat, engines, calculates, config(tools=[CALCULATOR]), prompt())
    assert sorted(body["sampling_params"]["seed"] for body in requests(engines)) == again


def test_a_later_turn_whose_engine_fails_is_made_on_another(chat: Chat, engines: list[FakeEngine]) -> None:
    def breaks_the_first(text: str, index: int) -> str:
        if "<tool_call>" not in text:
            engines[0].faults.append(Fault(GENERATE, "reset", times=1))
        return calculates(text, index)

    rows = make(chat, engines, breaks_the_first, config(tools=[CALCULATOR]), prompt())
    assert [row["status"] for row in rows] == [OK] * SIZE
    assert {name for row in rows for name in row["engine"].split(",")} <= {"e0", "e1"}


def test_an_environment_opens_and_answers_and_rewards(chat: Chat, engines: list[FakeEngine]) -> None:
    rewards = Rewards()
    rows = make(chat, engines, lambda text, index: "x", config(counting(steps=3)), prompt(a=1), rewards)
    seeds = {seed for instance in Counting.made for _, seed in instance.resets}
    assert len(Counting.made) == SIZE and len(seeds) == 1
    task = f"task {seeds.pop() % 10}"
    for row in rows:
        assert task in "".join(chat.pieces(row["token_ids"][: row["prompt_length"]]))
        assert (row["turns"], row["environment"]) == (3, "python")
        used = {use["name"]: use["calls"] for use in row["environment_usage"]}
        assert used == {"reset": 1, "step": 3, "reward": 1}
        assert all(use["seconds"] > 0 for use in row["environment_usage"])
        assert dict(row["reward_components"]) == {"m:f": 1.0, "environment": 3.0}
        assert row["reward"] == 1.0 + 2.0 * 3.0
    assert all(task in asked[-1]["content"] for asked in rewards.calls[0]["prompts"])
    assert Counting.made[0].resets[0][0] == {"a": 1, "prompt": prompt().messages}
    assert [body["sampling_params"]["n"] for body in requests(engines)].count(SIZE) == 1


def test_siblings_that_are_opened_differently_get_a_request_each(chat: Chat, engines: list[FakeEngine]) -> None:
    rows = make(chat, engines, lambda text, index: "x", config(counting(steps=1)), prompt(word="different"))
    assert [row["status"] for row in rows] == [OK] * SIZE
    assert [body["sampling_params"]["n"] for body in requests(engines)] == [1] * SIZE
    seeds = {body["sampling_params"]["seed"] for body in requests(engines)}
    assert len(seeds) == SIZE and {row["seed"] for row in rows} == seeds


@pytest.mark.parametrize("word", ["reset raise", "step raise", "reward raise"])
def test_a_rollout_whose_environment_fails_is_tried_again_in_another(
    chat: Chat, engines: list[FakeEngine], word: str
) -> None:
    rows = make(chat, engines, lambda text, index: "x", config(counting(hits=[1])), prompt(word=word))
    assert [row["status"] for row in rows] == [OK] * SIZE
    assert [dict(row["reward_components"])["environment"] for row in rows] == [2.0] * SIZE
    assert sum(len(instance.resets) for instance in Counting.made) == SIZE + 1
    # The turns of the attempt that came to nothing.
    turn = len(spelled(chat, "x"))
    assert {row["discarded_tokens"] for row in rows} == {{"reset": 0, "step": 1, "reward": 2}[word.split()[0]] * turn}
    # The rollout that was tried again was given the same task.
    assert len({seed for instance in Counting.made for _, seed in instance.resets}) == 1


def test_an_environment_that_fails_for_good_makes_the_group_a_tombstone_and_never_a_zero(
    chat: Chat, engines: list[FakeEngine]
) -> None:
    rewards = Rewards()
    settings = config(counting(hits=range(99)), max_rollout_attempts=2)
    (row,) = make(chat, engines, lambda text, index: "x", settings, prompt(word="step raise"), rewards)
    assert row["status"] == FAILED and row.get("reward") is None and rewards.calls == []
    assert "4 of 4 rollouts failed" in row["error"] and "2 attempts failed" in row["error"]
    assert "step of environment Counting failed: KeyError: 'lost'" in row["error"]


def test_a_cause_that_cannot_be_stored_as_it_is_is_stored(chat: Chat, engines: list[FakeEngine]) -> None:
    """Half a surrogate pair in an error must not cost the lease its part."""
    settings = config({**counting(), "factory": f"{SAMPLES}.sample_environments:Unspeakable"}, max_rollout_attempts=1)
    (row,) = make(chat, engines, lambda text, index: "x", settings, prompt())
    assert row["status"] == FAILED and "OSError: no \ufffd" in row["error"]


@pytest.mark.parametrize("broken", ["reset", "step", "reward"])
def test_what_an_environment_must_not_return_costs_its_rollout_alone(
    chat: Chat, engines: list[FakeEngine], broken: str
) -> None:
    rewards = Rewards()
    settings = config(counting(hits=[1]), max_rollout_attempts=1, min_group_members=3)
    rows = make(chat, engines, lambda text, index: "x", settings, prompt(word=f"{broken} nonsense"), rewards)
    assert [row["status"] for row in rows] == [OK] * 3
    assert all(f"{broken} of environment Counting failed: OutputFault" in row["error"] for row in rows)
    assert len(rewards.calls[0]["prompts"]) == 3


@pytest.mark.parametrize(("least", "status"), [(None, FAILED), (4, FAILED), (3, OK)])
def test_survivors_are_a_group_of_their_own_if_there_are_enough(
    chat: Chat, engines: list[FakeEngine], least: int | None, status: str
) -> None:
    settings = config(counting(hits=[1]), max_rollout_attempts=1, min_group_members=least)
    rewards = Rewards()
    rows = make(chat, engines, lambda text, index: "x", settings, prompt(word="step raise"), rewards)
    assert {row["status"] for row in rows} == {status}
    if status == OK:
        assert len(rows) == 3 and len({row["rollout"] for row in rows}) == 3
        assert all("1 of 4 rollouts failed, the first with:" in row["error"] for row in rows)
        assert len(rewards.calls[0]["prompts"]) == 3
        assert all(row["reward"] == 5.0 for row in rows)


def test_an_outage_between_two_turns_is_not_the_prompts_fault(chat: Chat, engines: list[FakeEngine]) -> None:
    pool = Pool()

    def then_nobody_is_left(text: str, index: int) -> str:
        pool.live(Stamp(1, 4), ())
        return "x"

    with pytest.raises(NoEngine):
        make(chat, engines, then_nobody_is_left, config(counting()), prompt(), pool=pool)
    assert sum(len(instance.answers) for instance in Counting.made) == SIZE


@pytest.mark.parametrize(("stale_policy", "made_again"), [("drop", 2), ("wait", 2), ("mask", 1)])
def test_a_rollout_that_was_cut_off_from_outside_begins_anew_where_its_earlier_turns_would_cost_the_group(
    chat: Chat, engines: list[FakeEngine], stale_policy: str, made_again: int
) -> None:
    engine = engines[0]
    aborted: list[str] = []

    def aborts_one(text: str, index: int) -> str:
        if "tool\n1" in text and not aborted:
            aborted.append(engine.bodies[-1][1]["request_id"])
            engine._aborted.add(f"generate-tokens-{aborted[0]}")
        return calculates(text, index)

    settings = config(tools=[CALCULATOR])
    settings = RunConfig.model_validate(
        {
            **settings.model_dump(),
            "grpo": {"num_generations_per_prompt": SIZE, "async_grpo": {"stale_policy": stale_policy}},
        }
    )
    rows = make(chat, [engine], aborts_one, settings, prompt())
    assert aborted and [row["status"] for row in rows] == [OK] * SIZE
    assert [row["turns"] for row in rows] == [2] * SIZE
    # The shared first turn, one turn for each, and the rollout that began anew, or its turn alone.
    assert len(requests([engine])) == 1 + SIZE + made_again
    discarded = len(spelled(chat, calculates("", 0))) if made_again == 2 else 0
    assert {(row["aborted_requests"], row["failed_requests"], row["discarded_tokens"]) for row in rows} == {
        (1, 0, discarded)
    }


@pytest.mark.parametrize("tool", ["nowhere:tool", f"{SAMPLES}.sample_tools:undescribed"])
def test_a_tool_that_cannot_be_offered_is_refused_before_anything_is_generated(chat: Chat, tool: str) -> None:
    with pytest.raises(ValueError, match=tool):
        Generator(config(tools=[tool]), chat, Pool(), Rewards())  # type: ignore[arg-type]
