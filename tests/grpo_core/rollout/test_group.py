"""One prompt becomes one whole group that fits the shard, or a tombstone that names its cause."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import aiohttp
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.config import RunConfig
from grpo_core.recipe import parse
from grpo_core.rollout import turns
from grpo_core.rollout.chat import Chat
from grpo_core.rollout.engine import EngineClient
from grpo_core.rollout.group import Generator
from grpo_core.rollout.pool import NoEngine, Pool
from grpo_core.rollout.rewards import RewardError, Scores
from grpo_core.rollout.rows import FAILED, OK
from grpo_core.rollout.turns import Task
from grpo_core.seeds import derived_seed
from grpo_core.trajectory import Prompt, Stamp
from storage import schema
from tests.fake_engine import GENERATE, FakeEngine, Fault
from tests.grpo_core import tiny

PROMPT = Prompt(5, 1, 3, [{"role": "user", "content": "What is 1 plus 2?"}], {"answer": "3", "note": None})


class Rewards:
    """Scores by the length of the answer; raises `error` when there is one."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.error: RewardError | None = None

    def submit(self, **call: Any) -> Future[Scores]:
        self.calls.append(call)
        answer: Future[Scores] = Future()
        if self.error is not None:
            answer.set_exception(self.error)
            return answer
        values = [float(len(ids)) for ids in call["completion_ids"]]
        values[0] = float("nan")
        answer.set_result(Scores({"m:f": [None, *values[1:]]}, values, wait_seconds=0.25, seconds=1.5))
        return answer


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return Chat(tiny.make(tmp_path_factory.mktemp("policy") / "tiny"), {})


@pytest.fixture
def engines() -> Iterator[list[FakeEngine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(FakeEngine(version="1.4")) for _ in range(2)]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = asyncio.sleep
    monkeypatch.setattr(turns.asyncio, "sleep", lambda seconds: sleep(min(seconds, 0.01)))


def config(**sections: dict[str, Any]) -> RunConfig:
    values: dict[str, dict[str, Any]] = {
        "grpo": {"num_generations_per_prompt": 4},
        "generation": {"max_completion_length": 6, "request_timeout_seconds": 5},
        "model": {"context_length": 64},
        "pool": {"kind": "local", "start_timeout_seconds": 1},
    }
    for section, keys in sections.items():
        values[section] = {**values.get(section, {}), **keys}
    return parse({"run_id": "r", **values}, where="test")


def pool_of(engines: list[FakeEngine]) -> Pool:
    """All of them carry version 1.4."""
    pool = Pool()
    for number, engine in enumerate(engines):
        pool.join(f"e{number}", engine.url)
    pool.live(Stamp(1, 4), tuple(f"e{number}" for number in range(len(engines))))
    return pool


def make(
    chat: Chat, engines: list[FakeEngine], prompt: Prompt = PROMPT, rewards: Rewards | None = None, **generation: Any
) -> list[dict[str, Any]]:
    return run_group(config(generation=generation), chat, pool_of(engines), prompt, rewards)


def run_group(
    config: RunConfig, chat: Chat, pool: Pool, prompt: Prompt = PROMPT, rewards: Rewards | None = None, lease: int = 0
) -> list[dict[str, Any]]:
    generator = Generator(config, chat, pool, rewards or Rewards())  # type: ignore[arg-type]

    async def run() -> list[dict[str, Any]]:
        async with aiohttp.ClientSession() as session:
            return await generator.group(prompt, session, attempt=1, lease=lease)

    rows = asyncio.run(run())
    assert pool.load() == 0
    return rows


def test_requests_for_an_ordinal_that_is_leased_again_have_names_of_their_own(
    chat: Chat, engines: list[FakeEngine]
) -> None:
    """Those of the lease that expired may still be in flight."""
    for lease in (3, 4):
        run_group(config(), chat, pool_of(engines[:1]), lease=lease)
    first, second = (body["request_id"] for path, body in engines[0].bodies if path == GENERATE)
    assert first != second


def as_shard(rows: list[dict[str, Any]]) -> pa.Table:
    return schema.table([{"attempt": 1, "lease": 0, "part": 0, **row} for row in rows], schema.SHARD)


def test_rows_fit_the_shard_and_carry_tokens_versions_and_rewards(chat: Chat, engines: list[FakeEngine]) -> None:
    rewards = Rewards()
    rows = make(chat, engines, rewards=rewards)
    table, _ = schema.decode(schema.encode(as_shard(rows), schema.SHARD, {}))
    assert table.column("rollout").to_pylist() == [0, 1, 2, 3]
    assert table.column("status").to_pylist() == [OK] * 4
    assert table.column("reward").to_pylist()[0] is None and table.column("reward").to_pylist()[1] == 6.0
    prompt_ids = chat.render(PROMPT.messages)
    for row in table.to_pylist():
        generated = len(row["token_ids"]) - len(prompt_ids)
        assert row["token_ids"][: len(prompt_ids)] == prompt_ids and row["prompt_length"] == len(prompt_ids)
        assert row["loss_mask"] == [False] * len(prompt_ids) + [True] * generated
        assert row["version_spans"] == [
            {"attempt": 1, "version": 4, "start": len(prompt_ids), "end": len(row["token_ids"])}
        ]
        assert all(value < 0 for value in row["logprobs"][len(prompt_ids) :])
        assert (row["ordinal"], row["epoch"], row["dataset_index"], row["min_version"]) == (5, 1, 3, 4)
        assert (row["scoring_wait_seconds"], row["scoring_seconds"], row["discarded_tokens"]) == (0.25, 1.5, 0)
    (call,) = rewards.calls
    assert call["columns"] == {"answer": ["3"] * 4, "note": [None] * 4}
    assert call["completion_ids"] == [row["token_ids"][len(prompt_ids) :] for row in rows]
    assert all(completion[0]["role"] == "assistant" for completion in call["completions"])


def test_the_engine_is_told_how_to_sample_and_where_to_stop(chat: Chat, engines: list[FakeEngine]) -> None:
    make(chat, engines[:1])
    ((_, body),) = [call for call in engines[0].bodies if call[0] == GENERATE]
    sampling = body["sampling_params"]
    assert sampling["stop_token_ids"] == list(chat.stop_token_ids)
    assert (sampling["n"], sampling["temperature"], sampling["max_tokens"]) == (4, 1.0, 6)
    assert sampling["seed"] == derived_seed(0, 5, 0)
    assert body["cache_salt"] == "1.4"


def test_the_completion_is_cut_to_what_the_context_leaves(chat: Chat, engines: list[FakeEngine]) -> None:
    room = 64 - len(chat.render(PROMPT.messages))
    rows = make(chat, engines, max_completion_length=60)
    assert max(sum(row["loss_mask"]) for row in rows) == room


@pytest.mark.parametrize("kind", ["status", "reset", "nan_logprob", "missing_span", "wrong_version"])
def test_a_failed_request_is_tried_again(chat: Chat, engines: list[FakeEngine], kind: Any) -> None:
    for engine in engines:
        engine.faults.append(Fault(GENERATE, kind))
    rows = make(chat, engines)
    assert [row["status"] for row in rows] == [OK] * 4
    asked = sum(engine.calls.count(GENERATE) for engine in engines)
    assert asked in (2, 3)
    assert {(row["failed_requests"], row["aborted_requests"]) for row in rows} == {(asked - 1, 0)}


@pytest.mark.parametrize(
    "kind",
    ["null_logprob", "nan_logprob", "clamped_logprob", "missing_logprob", "wrong_version", "missing_span", "empty"],
)
def test_a_bad_answer_is_made_again_alone_and_elsewhere_with_a_seed_of_its_own(
    chat: Chat, engines: list[FakeEngine], kind: Any
) -> None:
    engines[0].faults.append(Fault(GENERATE, kind))
    rows = make(chat, engines)
    assert [row["status"] for row in rows] == [OK] * 4
    assert [row["engine"] for row in rows] == ["e1", "e0", "e0", "e0"]
    asked = [body["sampling_params"] for engine in engines for path, body in engine.bodies if path == GENERATE]
    shared, alone = derived_seed(0, 5, 0), derived_seed(0, 5, 0, 0, 1)
    assert [(sampling["n"], sampling["seed"]) for sampling in asked] == [(4, shared), (1, alone)]
    assert [row["seed"] for row in rows] == [alone, shared, shared, shared]
    assert {(row["failed_requests"], row["discarded_tokens"]) for row in rows} == {(1, 0)}


def test_a_rollout_whose_answers_stay_bad_fails_for_good_and_leaves_its_siblings(
    chat: Chat, engines: list[FakeEngine]
) -> None:
    for engine in engines:
        engine.faults.append(Fault(GENERATE, "nan_logprob", times=99))
    rows = make(chat, engines, min_group_members=3)
    assert [(row["rollout"], row["status"]) for row in rows] == [(1, OK), (2, OK), (3, OK)]
    assert "1 of 4 rollouts failed, the first with: 3 attempts failed" in rows[0]["error"]
    assert sum(engine.calls.count(GENERATE) for engine in engines) == 3
    (row,) = make(chat, engines, max_rollout_attempts=1)
    assert (row["status"], "1 attempts failed" in row["error"]) == (FAILED, True)


def test_a_request_that_was_cut_off_is_made_again_whole(chat: Chat, engines: list[FakeEngine]) -> None:
    """What some siblings had finished before is as old as what was cut off."""
    engine = engines[0]
    respond = engine._generate

    async def cut_one(body: dict[str, Any]) -> dict[str, Any]:
        answer = await respond(body)
        if len(engine.bodies) == 1:
            answer["choices"][2]["finish_reason"] = "abort"
        return answer

    engine._generate = cut_one  # type: ignore[method-assign]
    rows = make(chat, [engine])
    assert [row["status"] for row in rows] == [OK] * 4
    assert [body["sampling_params"]["n"] for path, body in engine.bodies if path == GENERATE] == [4, 4]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"choices": [null]}', "[" * 100_000])
def test_an_answer_that_is_none_is_a_failure_of_the_request_alone(
    chat: Chat, engines: list[FakeEngine], text: str
) -> None:
    engines[0].faults.append(Fault(GENERATE, "garbage", times=99, text=text))
    assert [row["status"] for row in make(chat, engines)] == [OK] * 4
    (row,) = make(chat, engines[:1])
    assert (row["status"], "e0" in row["error"]) == (FAILED, True)


def test_a_turn_on_an_old_salt_is_made_again_by_the_same_engine_at_once(chat: Chat, engines: list[FakeEngine]) -> None:
    """A refit came between salt and answer, which is nobody's fault."""
    engines[0].faults.append(Fault(GENERATE, "wrong_version", version="1.3"))
    kept = {"async_grpo": {"recompute_kv_cache_after_weight_updates": False}}
    pool = pool_of(engines)
    rows = run_group(config(grpo=kept), chat, pool)
    assert [row["status"] for row in rows] == [OK] * 4
    assert [engine.calls.count(GENERATE) for engine in engines] == [2, 0]
    assert [body["sampling_params"]["n"] for path, body in engines[0].bodies if path == GENERATE] == [4, 1]
    assert [member.rests_until for member in pool.members()] == [0.0, 0.0]


def test_with_adapters_the_request_names_the_live_one_and_an_engine_without_it_is_left_for_another(
    chat: Chat, engines: list[FakeEngine]
) -> None:
    engines[1].adapters["1.4"] = "there"
    adapted = {"model": {"lora": {}}, "refit": {"adapter_only": True}}
    rows = run_group(config(**adapted), chat, pool_of(engines))
    assert [row["status"] for row in rows] == [OK] * 4
    assert [engine.calls.count(GENERATE) for engine in engines] == [1, 1]
    assert all(body["model"] == "1.4" for engine in engines for path, body in engine.bodies if path == GENERATE)
    assert {(span["attempt"], span["version"]) for row in rows for span in row["version_spans"]} == {(1, 4)}


def test_a_group_whose_budget_is_spent_is_a_tombstone(chat: Chat, engines: list[FakeEngine]) -> None:
    engines[0].faults.append(Fault(GENERATE, "status", times=99))
    rewards = Rewards()
    (row,) = make(chat, engines[:1], rewards=rewards, max_rollout_attempts=2)
    assert engines[0].calls.count(GENERATE) == row["failed_requests"] == 2
    assert (row["status"], row["ordinal"], row.get("reward")) == (FAILED, 5, None)
    assert "2 attempts failed" in row["error"] and "500" in row["error"]
    assert as_shard([row]).num_rows == 1
    assert rewards.calls == []


def test_a_rejected_request_is_not_repeated(chat: Chat, engines: list[FakeEngine]) -> None:
    engines[0].faults.append(Fault(GENERATE, "status", times=99, status=400))
    (row,) = make(chat, engines[:1])
    assert row["status"] == FAILED and engines[0].calls.count(GENERATE) == 1


def test_a_prompt_too_long_for_the_context_is_a_tombstone(chat: Chat, engines: list[FakeEngine]) -> None:
    long = Prompt(6, 0, 0, [{"role": "user", "content": "zq " * 200}])
    (row,) = make(chat, engines, long)
    assert row["status"] == FAILED and "model.context_length=64" in row["error"]
    assert engines[0].calls == engines[1].calls == []


def test_a_prompt_that_the_template_cannot_render_is_a_tombstone(chat: Chat, engines: list[FakeEngine]) -> None:
    (row,) = make(chat, engines, Prompt(6, 0, 0, [{"role": "user"}]))
    assert row["status"] == FAILED and "ChatError" in row["error"]


def test_a_group_that_cannot_be_scored_is_a_tombstone(chat: Chat, engines: list[FakeEngine]) -> None:
    rewards = Rewards()
    rewards.error = RewardError("the reward function is broken")
    (row,) = make(chat, engines, rewards=rewards)
    assert row["status"] == FAILED and row["error"] == "RewardError: the reward function is broken"
    assert row["discarded_tokens"] == 4 * 6 and row["failed_requests"] == 0


def test_that_there_is_no_engine_is_not_the_prompts_fault(chat: Chat) -> None:
    with pytest.raises(NoEngine, match="no engine"):
        make(chat, [])


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**9), st.integers(0, 50)), unique=True, max_size=50))
def test_seeds_of_different_turns_differ_and_fit_int64(parts: list[tuple[int, int, int]]) -> None:
    seeds = [derived_seed(*part) for part in parts]
    assert len(set(seeds)) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derived_seed(1, 23) != derived_seed(12, 3)


@pytest.mark.parametrize("cancellable", [True, False])
def test_only_what_may_be_cut_off_is_listed(
    chat: Chat, engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, cancellable: bool
) -> None:
    pool, listed = Pool(), []
    pool.join("e0", engines[0].url)
    pool.live(Stamp(1, 4), ("e0",))
    generator = Generator(config(), chat, pool, Rewards())  # type: ignore[arg-type]
    generate = EngineClient.generate_many

    async def watched(*arguments: Any, **named: Any) -> Any:
        listed.extend(pool.in_flight())
        return await generate(*arguments, **named)

    monkeypatch.setattr(EngineClient, "generate_many", watched)

    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            await generator.rollouts(Task(PROMPT, session, "n", (0,), 1.0, cancellable), 2)

    asyncio.run(run())
    assert [request.request_id for request in listed] == (["n-0-1"] if cancellable else [])
