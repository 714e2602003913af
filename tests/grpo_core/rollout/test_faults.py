"""What an engine can do to a request: the client always knows by the deadline, and always names the engine.

A hang without a deadline would never end here; `python -m benchmarks.detection` measures how long each takes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import pytest

from grpo_core.refit.control import ControlError, EngineAddress, EngineControl
from grpo_core.refit.phases import ENGINE_FAILURES
from grpo_core.rollout.engine import EngineClient, EngineRejected, EngineUnavailable
from grpo_core.rollout.wire import InvalidGeneration
from grpo_core.trajectory import Turn, VersionSpan
from tests.fake_engine import GENERATE, FakeEngine, Fault
from tests.turns import one_turn

DEADLINE = 5.0


@dataclass(frozen=True)
class Sampling:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine(version="1.4") as running:
        yield running


def generate(
    engine: FakeEngine, *, tokens: int = 5, salt: str = "1.4", deadline: float = DEADLINE, **client: Any
) -> Turn:
    async def run() -> Turn:
        async with aiohttp.ClientSession() as session:
            return await one_turn(
                EngineClient(engine.url, session=session, name="e0", **client),
                [1, 2, 3], request_id="r", sampling=Sampling(), max_tokens=tokens, seed=3, stop_token_ids=[],
                cache_salt=salt, deadline_seconds=deadline,
            )  # fmt: skip

    return asyncio.run(run())


FAULTS: dict[str, tuple[Fault, type[Exception], str]] = {
    "delay": (Fault(GENERATE, "delay", seconds=30), EngineUnavailable, "no answer within 0.5 s"),
    "silence": (Fault(GENERATE, "hang"), EngineUnavailable, "no answer within 0.5 s"),
    "4xx": (Fault(GENERATE, "status", status=400), EngineRejected, "400"),
    "5xx": (Fault(GENERATE, "status", status=503), EngineUnavailable, "503"),
    "reset": (Fault(GENERATE, "reset"), EngineUnavailable, "lost its connection"),
    "death": (Fault(GENERATE, "die"), EngineUnavailable, "lost its connection"),
    "death in mid-request": (Fault(GENERATE, "die", seconds=0.2), EngineUnavailable, "lost its connection"),
    "null log-prob": (Fault(GENERATE, "null_logprob"), InvalidGeneration, "log-prob None"),
    "NaN": (Fault(GENERATE, "nan_logprob"), InvalidGeneration, "log-prob nan"),
    "NaN as vLLM says it": (Fault(GENERATE, "clamped_logprob"), InvalidGeneration, "log-prob -9999"),
    "no version": (Fault(GENERATE, "wrong_version", version="default"), InvalidGeneration, "unstamped weights"),
    "missing version": (Fault(GENERATE, "missing_span"), InvalidGeneration, "stamped 0 of"),
    "no token": (Fault(GENERATE, "empty"), InvalidGeneration, "before its first token"),
    "nonsense": (Fault(GENERATE, "garbage", text="hm"), InvalidGeneration, "answered no JSON"),
}


@pytest.mark.parametrize(("fault", "kind", "said"), FAULTS.values(), ids=FAULTS)
def test_every_fault_is_known_and_names_the_engine(
    engine: FakeEngine, fault: Fault, kind: type[Exception], said: str
) -> None:
    engine.faults.append(replace(fault))
    engine.seconds_per_token = 0.05
    deadline = 0.5 if fault.kind in ("delay", "hang") else DEADLINE
    with pytest.raises(kind, match="engine e0.*" + said):
        generate(engine, tokens=20, deadline=deadline)


def test_an_engine_that_was_restarted_with_its_first_weights_is_not_believed(engine: FakeEngine) -> None:
    assert generate(engine).spans == (VersionSpan(1, 4, 0, 5),)
    engine.restart()
    with pytest.raises(InvalidGeneration, match="e0 sampled with unstamped weights") as caught:
        generate(engine)
    assert caught.value.reason == "version"


def straddle(engine: FakeEngine, **client: Any) -> Turn:
    """A request that waits in a paused engine while its version changes, as through a refit."""
    control = EngineControl(EngineAddress("e0", engine.url))
    control.pause("keep", False, DEADLINE)

    def refit() -> None:
        while GENERATE not in engine.calls:
            time.sleep(0.01)
        control.start(DEADLINE)
        control.finish("1.5", DEADLINE)
        control.resume(DEADLINE)

    thread = threading.Thread(target=refit)
    thread.start()
    try:
        return generate(engine, **client)
    finally:
        thread.join()


def test_with_kept_caches_a_turn_that_began_under_another_version_is_made_again(engine: FakeEngine) -> None:
    with pytest.raises(InvalidGeneration, match=r"began a turn with version 1\.5 on the cache of 1\.4") as caught:
        straddle(engine, kept_caches=True)
    assert caught.value.reason == "salt"
    assert generate(engine, salt="1.5", kept_caches=True).spans == (VersionSpan(1, 5, 0, 5),)


def test_with_cleared_caches_it_is_exact_and_kept(engine: FakeEngine) -> None:
    assert straddle(engine).spans == (VersionSpan(1, 5, 0, 5),)


def test_with_kept_caches_a_turn_may_go_on_under_the_next_version(engine: FakeEngine) -> None:
    engine.seconds_per_token = 0.05
    threading.Timer(0.2, setattr, (engine, "version", "1.5")).start()
    turn = generate(engine, tokens=20, kept_caches=True)
    assert [(span.attempt, span.version) for span in turn.spans] == [(1, 4), (1, 5)]


def test_a_turn_of_an_adapter_is_of_the_version_it_named(engine: FakeEngine) -> None:
    engine.adapters["1.7"] = "/adapters/1.7"
    turn = generate(engine, salt="1.7", adapters=True)
    assert turn.spans == (VersionSpan(1, 7, 0, 5),)


def test_an_engine_that_has_lost_its_adapter_is_lost_and_not_the_request_wrong(engine: FakeEngine) -> None:
    with pytest.raises(EngineUnavailable, match=r"`1\.8` does not exist"):
        generate(engine, salt="1.8", adapters=True)


def test_an_answer_of_the_policy_is_not_taken_for_one_of_an_adapter(engine: FakeEngine) -> None:
    respond = engine._generate

    async def forget_adapter(body: dict[str, Any]) -> dict[str, Any]:
        return await respond({**body, "model": "policy"})

    engine.adapters["1.7"] = "/adapters/1.7"
    engine._generate = forget_adapter  # type: ignore[method-assign]
    with pytest.raises(InvalidGeneration, match=r"with 'policy' instead of the adapter 1\.7"):
        generate(engine, salt="1.7", adapters=True)


CALLS: dict[str, Callable[[EngineControl], Any]] = {
    "/pause": lambda engine: engine.pause("keep", True, 0.5),
    "/start_weight_update": lambda engine: engine.start(0.5),
    "/update_weights": lambda engine: engine.update({}, 0.5),
    "/finish_weight_update": lambda engine: engine.finish("1.5", 0.5),
    "/resume": lambda engine: engine.resume(0.5),
    "/weight_info": lambda engine: engine.weight_stamp(0.5),
    "/abort_requests": lambda engine: engine.abort(["r"], 0.5),
    "/v1/load_lora_adapter": lambda engine: engine.load_adapter("1.5", "/a", 0.5),
}


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("fault", ["hang", "die", "reset", "status"])
def test_a_control_call_ends_by_its_deadline_whatever_the_engine_does(
    engine: FakeEngine, path: str, fault: Any
) -> None:
    engine.faults.append(Fault(path, fault))
    with pytest.raises(ControlError, match=f"engine e0: .*{path}") as caught:
        CALLS[path](EngineControl(EngineAddress("e0", engine.url)))
    assert ("read timeout=0.5" in str(caught.value)) is (fault == "hang"), "the deadline is the one that was given"


ANSWERS: dict[str, Callable[[EngineControl], Any]] = {
    "/weight_info": lambda engine: engine.weight_stamp(DEADLINE),
    "/get_world_size": lambda engine: engine.world_size(DEADLINE),
    "/v1/models": lambda engine: engine.adapters(DEADLINE),
    "/collective_rpc": lambda engine: engine.call_workers("staged", DEADLINE),
    GENERATE: lambda engine: engine.score([1, 2], "salt", DEADLINE),
}


@pytest.mark.parametrize("path", ANSWERS)
@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_version": 3, "world_size": "x", "data": [3], "results": 3}', "[" * 100_000]
)
def test_a_control_call_whose_answer_is_none_is_the_engines_failure(engine: FakeEngine, path: str, text: str) -> None:
    engine.faults.append(Fault(path, "garbage", text=text))
    with pytest.raises(ENGINE_FAILURES):
        ANSWERS[path](EngineControl(EngineAddress("e0", engine.url)))


def test_the_key_of_the_environment_is_sent(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    client = EngineClient(engine.url, session=None)  # type: ignore[arg-type]
    assert client._headers == {"Authorization": "Bearer secret"}
