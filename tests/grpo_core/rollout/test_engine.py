"""The engine client believes only what is complete, and sorts failures into retry, discard and bug."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import pytest

from grpo_core.refit.control import EngineAddress, EngineControl
from grpo_core.rollout.engine import EngineClient, EngineRejected, EngineUnavailable, InvalidGeneration, parse_metrics
from grpo_core.rollout.wire import (
    generate_request,
    next_token_request,
    parse_next_token,
    parse_scores,
    parse_spans,
    parse_turns,
)
from grpo_core.trajectory import Turn, VersionSpan
from tests.fake_engine import GENERATE, FakeEngine, Fault
from tests.turns import one_turn


@dataclass(frozen=True)
class Sampling:
    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine(version="1.4") as running:
        yield running


@asynccontextmanager
async def client(engine: FakeEngine) -> AsyncIterator[EngineClient]:
    async with aiohttp.ClientSession() as session:
        yield EngineClient(engine.url, session=session, name="e0")


def generate(engine: FakeEngine, n: int = 1, deadline: float = 10.0, **changes: Any) -> list[Turn]:
    """The turns of one request, each of which can be believed."""
    answers = ask(engine, n, deadline, **changes)
    for answer in answers:
        if isinstance(answer, InvalidGeneration):
            raise answer
    return [answer for answer in answers if isinstance(answer, Turn)]


def ask(engine: FakeEngine, n: int, deadline: float = 10.0, **changes: Any) -> list[Turn | InvalidGeneration]:
    arguments: dict[str, Any] = {
        "request_id": "r",
        "sampling": Sampling(),
        "max_tokens": 5,
        "seed": 3,
        "stop_token_ids": [],
        "cache_salt": "1.4",
    }

    async def run() -> list[Turn | InvalidGeneration]:
        async with client(engine) as engine_client:
            return await engine_client.generate_many(
                [1, 2, 3], n, deadline_seconds=deadline, **{**arguments, **changes}
            )

    return asyncio.run(run())


def test_turn_carries_tokens_logprobs_and_the_stamp_of_each_token(engine: FakeEngine) -> None:
    (turn,) = generate(engine)
    assert turn.first_token_at is None, "an answer that comes whole does not say when it began"
    assert turn.prompt_ids == [1, 2, 3]
    assert len(turn.output_ids) == len(turn.logprobs) == 5
    assert turn.spans == (VersionSpan(1, 4, 0, 5),)
    assert (turn.finish_reason, turn.engine) == ("length", "e0")
    assert turn.submitted_at <= turn.finished_at


def test_siblings_come_from_one_request_and_differ(engine: FakeEngine) -> None:
    turns = generate(engine, n=8)
    assert engine.calls.count(GENERATE) == 1
    assert len({tuple(turn.output_ids) for turn in turns}) == 8
    assert turns == [
        replace(again, submitted_at=turn.submitted_at, finished_at=turn.finished_at)
        for again, turn in zip(generate(engine, n=8), turns, strict=True)
    ]


def test_every_sampling_parameter_is_sent_explicitly() -> None:
    request = generate_request(
        [1], request_id="r", sampling=Sampling(), max_tokens=5, seed=3, stop_token_ids=[9], cache_salt="1.4", n=2
    )
    assert request["cache_salt"] == "1.4"
    expected = {
        "n": 2,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_tokens": 5,
        "min_tokens": 0,
        "seed": 3,
        "stop_token_ids": [9],
        "ignore_eos": False,
        "logprobs": 0,
        "skip_special_tokens": False,
        "detokenize": False,
    }
    assert request["sampling_params"] == expected


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("null_logprob", "logprob_missing"),
        ("nan_logprob", "logprob_value"),
        ("clamped_logprob", "logprob_value"),
        ("missing_logprob", "logprob_count"),
        ("wrong_version", "version"),
        ("missing_span", "spans"),
        ("empty", "empty"),
    ],
)
def test_answer_that_only_looks_well_is_discarded_with_its_reason(engine: FakeEngine, kind: Any, reason: str) -> None:
    engine.faults.append(Fault(GENERATE, kind))
    with pytest.raises(InvalidGeneration) as caught:
        generate(engine, n=2)
    assert caught.value.reason == reason
    assert "e0" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "no JSON", "[]", "3", "[" * 100_000, '{"choices": 1e999}', "\xff", '{"choices": ']
)
def test_whatever_an_engine_answers_is_a_turn_or_invalid(engine: FakeEngine, text: str) -> None:
    engine.faults.append(Fault(GENERATE, "garbage", text=text))
    with pytest.raises(InvalidGeneration, match="e0"):
        generate(engine)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault(GENERATE, "status", status=400), EngineRejected),
        (Fault(GENERATE, "status", status=422), EngineRejected),
        (Fault(GENERATE, "status", status=500), EngineUnavailable),
        (Fault(GENERATE, "status", status=503), EngineUnavailable),
        (Fault(GENERATE, "reset"), EngineUnavailable),
        (Fault(GENERATE, "die"), EngineUnavailable),
    ],
)
def test_failures_are_sorted_into_bug_and_retry_elsewhere(
    engine: FakeEngine, fault: Fault, error: type[Exception]
) -> None:
    engine.faults.append(fault)
    with pytest.raises(error, match="e0"):
        generate(engine)


def test_silence_ends_at_the_deadline(engine: FakeEngine) -> None:
    engine.faults.append(Fault(GENERATE, "hang"))
    with pytest.raises(EngineUnavailable, match=r"within 0\.2 s"):
        generate(engine, deadline=0.2)


def test_unstarted_engine_is_unavailable() -> None:
    with FakeEngine() as gone:
        pass
    with pytest.raises(EngineUnavailable):
        generate(gone)


def test_request_waits_while_the_engine_is_paused_and_goes_on_under_the_new_stamp(engine: FakeEngine) -> None:
    engine.seconds_per_token = 0.02

    async def run() -> Turn:
        async with client(engine) as engine_client, aiohttp.ClientSession() as session:
            task = asyncio.create_task(
                one_turn(
                    engine_client,
                    [1],
                    request_id="r",
                    sampling=Sampling(),
                    max_tokens=40,
                    seed=1,
                    stop_token_ids=[],
                    cache_salt="1.4",
                    deadline_seconds=20,
                )
            )
            await asyncio.sleep(0.2)
            for path, body in [
                ("/pause?mode=keep", None),
                ("/start_weight_update", None),
                ("/update_weights", {"update_info": {}}),
                ("/finish_weight_update", {"weight_version": "1.5"}),
                ("/resume", None),
            ]:
                async with session.post(engine.url + path, json=body) as response:
                    assert response.status == 200
            return await task

    turn = asyncio.run(run())
    assert [(span.version, span.start, span.end) for span in turn.spans] == [
        (4, 0, turn.spans[0].end),
        (5, turn.spans[0].end, 40),
    ]


def test_abort_names_the_request_as_the_engine_knows_it(engine: FakeEngine) -> None:
    engine.seconds_per_token = 0.01

    async def run() -> Turn:
        async with client(engine) as engine_client:
            task = asyncio.create_task(
                one_turn(
                    engine_client,
                    [1],
                    request_id="mine",
                    sampling=Sampling(),
                    max_tokens=1000,
                    seed=1,
                    stop_token_ids=[],
                    cache_salt="s",
                    deadline_seconds=20,
                )
            )
            await asyncio.sleep(0.1)
            await asyncio.to_thread(EngineControl(EngineAddress("e0", engine.url)).abort, ["mine"], 5)
            return await task

    with pytest.raises(InvalidGeneration, match=r"'abort' after \d+ tokens") as caught:
        asyncio.run(run())
    assert caught.value.reason == "aborted"


def test_metrics_sum_over_labels_and_ignore_names_that_only_begin_alike() -> None:
    text = (
        '# TYPE x\nvllm:num_requests_waiting{engine="0"} 2\nvllm:num_requests_waiting{engine="1"} 3.0\n'
        'vllm:num_requests_waiting_by_reason{reason="capacity"} 9\nvllm:generation_tokens_total 1e3\n'
    )
    assert parse_metrics(text) == {"waiting": 5.0, "generation_tokens": 1000.0}


@pytest.mark.parametrize("value", ["NaN", "+Inf", "many", "1e", "0x10"])
def test_a_metric_that_is_no_finite_number_is_not_reported(value: str) -> None:
    assert parse_metrics(f"vllm:num_requests_waiting 2\nvllm:kv_cache_usage_perc {value}\n") == {"waiting": 2.0}


@pytest.mark.parametrize(
    "spans",
    [
        [("1.0", 0, 3)],
        [("1.0", 0, 2), ("1.1", 3, 4)],
        [("1.0", 0, 3), ("1.1", 2, 4)],
        [("1.0", 1, 4)],
        [("1.0", 0, 0), ("1.0", 0, 4)],
        [("1.0", 0, 5)],
        [],
    ],
)
def test_spans_that_do_not_cover_every_token_once_are_refused(spans: list[tuple[str, int, int]]) -> None:
    with pytest.raises(InvalidGeneration) as caught:
        parse_spans([{"version": v, "start": a, "end": b} for v, a, b in spans], 4, "e0")
    assert caught.value.reason == "spans"


def test_no_tokens_need_no_span() -> None:
    assert parse_spans([], 0, "e0") == ()


GOOD = {
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "token_ids": [7],
            "weight_versions": [{"version": "1.0", "start": 0, "end": 1}],
            "logprobs": {"content": [{"logprob": -0.5}]},
        }
    ]
}


def parsed(answer: Any, n: int = 1) -> Turn | InvalidGeneration:
    """The first turn of an answer, or why it cannot be believed."""
    try:
        return parse_turns(answer, [1], n, engine="e0", submitted_at=0, finished_at=1)[0]
    except InvalidGeneration as error:
        return error


def changed(path: list[Any], value: Any) -> Any:
    """GOOD with another value in one place."""
    answer: Any = copy.deepcopy(GOOD)
    owner = answer
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = value
    return answer


FIRST = ["choices", 0]


@pytest.mark.parametrize(
    "path",
    [
        ["choices"],
        FIRST,
        *([*FIRST, name] for name in ("index", "token_ids", "finish_reason", "weight_versions", "logprobs")),
        [*FIRST, "token_ids", 0],
        [*FIRST, "logprobs", "content"],
        [*FIRST, "logprobs", "content", 0],
        [*FIRST, "weight_versions", 0],
        [*FIRST, "weight_versions", 0, "version"],
        [*FIRST, "weight_versions", 0, "end"],
    ],
)
@pytest.mark.parametrize(
    "value", [None, "x", [], {}, [[]], -1, 2.5, True, math.nan, math.inf, 2**31, 2**80, {"index": 0}, [{"index": {}}]]
)
def test_an_answer_with_nonsense_in_any_place_is_invalid_and_nothing_else(path: list[Any], value: Any) -> None:
    assert isinstance(parsed(GOOD), Turn)
    assert isinstance(parsed(changed(path, value)), InvalidGeneration)


@pytest.mark.parametrize("value", [None, "x", [], {}, True, math.nan, math.inf, -math.inf, -9999, 10**400, -(10**400)])
def test_a_log_prob_that_is_none_is_invalid_and_nothing_else(value: Any) -> None:
    assert isinstance(parsed(changed([*FIRST, "logprobs", "content", 0, "logprob"], -0.25)), Turn)
    assert isinstance(parsed(changed([*FIRST, "logprobs", "content", 0, "logprob"], value)), InvalidGeneration)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "x",
        [],
        {},
        [None, 3],
        [None, {"2": {}}],
        [None, {"2": {"logprob": "x"}}],
        [None, {"2": {"logprob": 10**400}}],
    ],
)
def test_scores_that_are_none_are_invalid_and_nothing_else(value: Any) -> None:
    with pytest.raises(InvalidGeneration):
        parse_scores({"prompt_logprobs": value}, [1, 2])
    content = [{"logprobs": {"content": [{"top_logprobs": value}]}}]
    entry = {"token_id": 2, "logprob": 10**400}
    with pytest.raises(InvalidGeneration):
        parse_next_token({"choices": [{"logprobs": {"content": [{"top_logprobs": [entry]}]}}]}, 2)
    with pytest.raises(InvalidGeneration):
        parse_next_token({"choices": content}, 2)
    with pytest.raises(InvalidGeneration):
        parse_next_token({"choices": value}, 2)


@pytest.mark.parametrize("reason", ["abort", "error", None])
def test_a_turn_that_was_cut_off_is_refused(reason: str | None) -> None:
    cut = parsed(changed([*FIRST, "finish_reason"], reason))
    assert isinstance(cut, InvalidGeneration) and cut.reason == "aborted"


def test_a_turn_without_a_token_is_refused() -> None:
    empty: Any = copy.deepcopy(GOOD)
    empty["choices"][0] |= {"token_ids": [], "weight_versions": [], "logprobs": {"content": []}}
    refused = parsed(empty)
    assert isinstance(refused, InvalidGeneration) and refused.reason == "empty"


def test_fewer_choices_than_asked_are_refused() -> None:
    refused = parsed(GOOD, 2)
    assert isinstance(refused, InvalidGeneration) and refused.reason == "choices"


def test_one_bad_choice_leaves_its_siblings_believable(engine: FakeEngine) -> None:
    engine.faults.append(Fault(GENERATE, "null_logprob"))
    bad, *good = ask(engine, n=3)
    assert isinstance(bad, InvalidGeneration) and bad.reason == "logprob_missing"
    assert [turn.seed for turn in good if isinstance(turn, Turn)] == [3, 3]


def test_scores_of_damaged_weights_are_nan() -> None:
    answer = {"prompt_logprobs": [None, {"2": {"logprob": -9999.0}}, {"3": {"logprob": -1.5}}]}
    scores = parse_scores(answer, [1, 2, 3])
    assert math.isnan(scores[0])
    assert scores[1] == -1.5


def test_a_next_token_request_is_one_step_of_ordinary_generation() -> None:
    request = next_token_request([1, 2, 3], "salt", model="1.7")
    sampling = request["sampling_params"]
    assert (request["model"], request["token_ids"], sampling["max_tokens"]) == ("1.7", [1, 2], 1)
    assert sampling["logprob_token_ids"] == [3, 3] and sampling["logprobs"] == 2
    assert "prompt_logprobs" not in sampling


def test_the_log_prob_of_a_next_token_is_the_wanted_ones_and_not_the_sampled_ones() -> None:
    def answer(*entries: tuple[int, float | None]) -> dict[str, Any]:
        top = [{"token_id": token, "logprob": logprob} for token, logprob in entries]
        return {"choices": [{"logprobs": {"content": [{"token_id": 9, "logprob": -5.0, "top_logprobs": top}]}}]}

    assert parse_next_token(answer((9, -5.0), (3, -0.25)), 3) == -0.25
    assert math.isnan(parse_next_token(answer((3, -9999.0)), 3))
    assert math.isnan(parse_next_token(answer((3, None)), 3))
    for damaged in (answer((9, -5.0)), {"choices": []}, {}):
        with pytest.raises(InvalidGeneration, match="no log-prob for token 3"):
            parse_next_token(damaged, 3)
