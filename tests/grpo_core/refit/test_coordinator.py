"""The protocol of a refit: its order, its deadlines, and who is resumed whatever happens."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import requests
import torch

from grpo_core.refit import phases
from grpo_core.refit.canary import Canary
from grpo_core.refit.control import EngineAddress, EngineControl
from grpo_core.refit.coordinator import RefitFailed, RefitResult, RefitSettings, refit_weights
from grpo_core.refit.digest import ManifestError
from grpo_core.refit.transfer import TransferError, Weights
from grpo_core.trajectory import Stamp
from storage.errors import Fenced
from tests.fake_engine import GENERATE, FakeEngine, Fault

SETTINGS = RefitSettings(
    connect_seconds=5,
    pause_seconds=5,
    start_seconds=5,
    transfer_seconds=5,
    finish_seconds=5,
    resume_seconds=5,
    canary_seconds=5,
    pause_mode="keep",
    clear_cache=True,
    digests=False,
)
WEIGHTS = [("model.embed_tokens.weight", torch.ones(4, 2)), ("lm_head.weight", torch.ones(4, 2))]
STAMP = Stamp(2, 7)
CANARY = Canary((1, 2, 3), (-math.log(128), -math.log(128)), tolerance=1e-4)
REFIT_ORDER = [
    "/get_world_size",
    "/init_weight_transfer_engine",
    "/pause",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/weight_info",
    "/resume",
    GENERATE,
]


class HttpTransfer:
    """A transfer that makes the HTTP calls of a real one and moves nothing; `failures` names engines that break."""

    concurrent = True

    def __init__(self, failures: dict[str, Exception] | None = None) -> None:
        self.failures = failures or {}
        self.opened: list[str] = []
        self.closed: list[str] = []

    def prepare(self, weights: Weights, stamp: Stamp) -> int:
        return weights.bytes

    def is_open(self, engine: str) -> bool:
        return engine in self.opened

    def open(self, engine: EngineControl, deadline_seconds: float) -> None:
        engine.init_transfer({"world_size": 1 + engine.world_size(deadline_seconds)}, deadline_seconds)
        self.opened.append(engine.name)

    def send(self, engine: EngineControl, weights: Weights, deadline_seconds: float) -> None:
        engine.update({"names": [entry.name for entry in weights.manifest]}, deadline_seconds)
        if engine.name in self.failures:
            raise self.failures[engine.name]

    def close(self, engine: str) -> None:
        self.closed.append(engine)
        if engine in self.opened:
            self.opened.remove(engine)


@pytest.fixture
def pool() -> Iterator[list[FakeEngine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(FakeEngine()) for _ in range(3)]


def refit(pool: list[FakeEngine], transfer: Any = None, canary: Canary | None = CANARY, **changes: Any) -> RefitResult:
    addresses = [EngineAddress(f"e{number}", engine.url) for number, engine in enumerate(pool)]
    settings = replace(SETTINGS, **changes)
    return refit_weights(WEIGHTS, addresses, STAMP, transfer or HttpTransfer(), settings, canary=canary)


def broken(result: RefitResult | RefitFailed) -> dict[str, str]:
    return {engine.name: engine.phase for engine in result.broken}


def test_phases_follow_each_other_on_every_engine(pool: list[FakeEngine]) -> None:
    result = refit(pool)
    assert result.refitted == ("e0", "e1", "e2")
    assert broken(result) == {}
    assert list(result.seconds) == ["prepare", "connect", "pause", "start", "transfer", "finish", "resume", "canary"]
    assert result.bytes == 2 * 4 * 2 * 4
    assert all(result.canary[name] <= 1e-9 for name in result.refitted)
    for engine in pool:
        assert engine.calls == REFIT_ORDER
        assert engine.version == "2.7"
        assert not engine.is_paused


def test_no_engine_is_sent_a_phase_before_all_are_through_the_one_before(pool: list[FakeEngine]) -> None:
    pool[0].faults.append(Fault("/pause", "delay", seconds=0.3))
    order: list[str] = []

    class Noting(EngineControl):
        def pause(self, mode: str, clear_cache: bool, deadline_seconds: float) -> None:
            super().pause(mode, clear_cache, deadline_seconds)
            order.append("paused")

        def start(self, deadline_seconds: float) -> None:
            order.append("start")
            super().start(deadline_seconds)

    addresses = [EngineAddress(f"e{number}", engine.url) for number, engine in enumerate(pool)]
    refit_weights(WEIGHTS, addresses, STAMP, HttpTransfer(), SETTINGS, canary=None, control=Noting)
    assert order == ["paused"] * 3 + ["start"] * 3


def test_links_are_kept_from_refit_to_refit(pool: list[FakeEngine]) -> None:
    transfer = HttpTransfer()
    refit(pool, transfer)
    refit(pool, transfer)
    for engine in pool:
        assert engine.calls.count("/init_weight_transfer_engine") == 1


def test_pause_is_asked_as_configured(pool: list[FakeEngine]) -> None:
    asked: list[tuple[str, bool]] = []

    class Noting(EngineControl):
        def pause(self, mode: str, clear_cache: bool, deadline_seconds: float) -> None:
            asked.append((mode, clear_cache))

    address = [EngineAddress("e0", pool[0].url)]
    settings = replace(SETTINGS, pause_mode="wait", clear_cache=False)
    refit_weights(WEIGHTS, address, STAMP, HttpTransfer(), settings, canary=None, control=Noting)
    assert asked == [("wait", False)]


@pytest.mark.parametrize(
    ("path", "phase", "resumed"),
    [
        ("/init_weight_transfer_engine", "connect", False),
        ("/pause", "pause", True),
        ("/start_weight_update", "start", False),
        ("/update_weights", "transfer", False),
        ("/finish_weight_update", "finish", False),
    ],
)
@pytest.mark.parametrize("kind", ["status", "reset", "die", "hang"])
def test_failing_engine_is_reported_and_the_others_go_on(
    pool: list[FakeEngine], path: str, phase: str, resumed: bool, kind: Any
) -> None:
    pool[1].faults.append(Fault(path, kind))
    transfer = HttpTransfer()
    short = 1.0 if kind == "hang" else 5.0
    result = refit(
        pool, transfer, connect_seconds=short, pause_seconds=short, start_seconds=short, transfer_seconds=short,
        finish_seconds=short,
    )  # fmt: skip
    assert result.refitted == ("e0", "e2")
    assert broken(result) == {"e1": phase}
    assert path in result.broken[0].cause
    assert transfer.closed == ["e1"]
    assert [engine.version for engine in pool] == ["2.7", "default", "2.7"]
    assert not pool[0].is_paused
    assert not pool[2].is_paused
    if kind != "die":
        assert ("/resume" in pool[1].calls) is resumed


@pytest.mark.parametrize(("path", "phase"), [("/weight_info", "finish"), ("/resume", "resume"), (GENERATE, "canary")])
@pytest.mark.parametrize("kind", ["status", "reset", "die", "hang"])
def test_an_engine_that_fails_after_it_has_the_weights_is_reported_and_the_others_go_on(
    pool: list[FakeEngine], path: str, phase: str, kind: Any
) -> None:
    pool[1].faults.append(Fault(path, kind))
    short = 1.0 if kind == "hang" else 5.0
    result = refit(pool, finish_seconds=short, resume_seconds=short, canary_seconds=short)
    assert result.refitted == ("e0", "e2")
    assert broken(result) == {"e1": phase}
    assert path in result.broken[0].cause
    assert not pool[0].is_paused and not pool[2].is_paused
    assert "e1" not in result.canary
    if kind != "die":
        assert pool[1].is_paused, "it samples with weights that nobody knows"


@pytest.mark.parametrize("kind", ["status", "reset", "die", "hang"])
@pytest.mark.parametrize("score", [lambda ids: [-1.0] * (len(ids) - 1), None])
def test_a_canary_is_the_cause_even_if_the_engine_cannot_be_stopped_after_it(
    pool: list[FakeEngine], kind: Any, score: Any
) -> None:
    class Unstoppable(EngineControl):
        def pause(self, mode: str, clear_cache: bool, deadline_seconds: float) -> None:
            if mode == "abort":
                pool[0].faults.append(Fault("/pause", kind))
            super().pause(mode, clear_cache, deadline_seconds)

    if score is None:
        pool[0].faults.append(Fault(GENERATE, "garbage", text="{}"))
    pool[0].score = score
    addresses = [EngineAddress(f"e{number}", engine.url) for number, engine in enumerate(pool)]
    settings = replace(SETTINGS, pause_seconds=0.5 if kind == "hang" else 5)
    result = refit_weights(WEIGHTS, addresses, STAMP, HttpTransfer(), settings, canary=CANARY, control=Unstoppable)
    assert broken(result) == {"e0": "canary"}
    first, _, second = result.broken[0].cause.partition("; and it could not be stopped: ")
    assert ("no log-probs" if score is None else "its weights are not the trainer's") in first
    assert "/pause" in second


def test_link_that_breaks_under_way_costs_its_engine_only(pool: list[FakeEngine]) -> None:
    result = refit(pool, HttpTransfer({"e2": TransferError("tensor x did not reach engine e2")}))
    assert result.refitted == ("e0", "e1")
    assert broken(result) == {"e2": "transfer"}
    assert "/finish_weight_update" not in pool[2].calls
    assert "/resume" not in pool[2].calls


def test_engine_that_carries_another_stamp_than_it_was_given_is_broken(pool: list[FakeEngine]) -> None:
    class Forgetful(EngineControl):
        def finish(self, stamp: str, deadline_seconds: float) -> None:
            super().finish("2.6" if self.name == "e0" else stamp, deadline_seconds)

    addresses = [EngineAddress(f"e{number}", engine.url) for number, engine in enumerate(pool)]
    result = refit_weights(WEIGHTS, addresses, STAMP, HttpTransfer(), SETTINGS, canary=None, control=Forgetful)
    assert broken(result) == {"e0": "finish"}
    assert "2.6" in result.broken[0].cause
    assert pool[0].is_paused


@pytest.mark.parametrize("score", [lambda ids: [-1.0] * (len(ids) - 1), lambda ids: [math.nan] * (len(ids) - 1)])
def test_engine_that_fails_the_canary_is_stopped(pool: list[FakeEngine], score: Any) -> None:
    pool[0].score = score
    result = refit(pool)
    assert broken(result) == {"e0": "canary"}
    assert result.refitted == ("e1", "e2")
    assert pool[0].is_paused
    assert "e0" not in result.canary


def test_canary_does_not_wait_behind_the_requests_that_wait() -> None:
    with FakeEngine(max_num_seqs=2, seconds_per_token=0.005) as engine, ThreadPoolExecutor(20) as threads:
        body = {"token_ids": [1], "sampling_params": {"max_tokens": 20, "seed": 1}}
        backlog = [threads.submit(requests.post, engine.url + GENERATE, json=body, timeout=60) for _ in range(20)]
        while engine.calls.count(GENERATE) < 20:
            time.sleep(0.001)
        assert refit([engine]).refitted == ("e0",)
        assert sum(request.done() for request in backlog) < 18


def test_an_engine_that_a_dead_trainer_left_half_written_is_not_resumed(pool: list[FakeEngine]) -> None:
    """vLLM refuses a second update; the engine stays paused until it is replaced."""
    control = EngineControl(EngineAddress("e1", pool[1].url))
    control.pause("keep", True, 5)
    control.start(5)
    pool[1].calls.clear()
    result = refit(pool)
    assert result.refitted == ("e0", "e2")
    assert broken(result) == {"e1": "start"}
    assert "/resume" not in pool[1].calls and pool[1].is_paused


def test_refit_of_no_engine_left_names_engine_phase_and_cause(pool: list[FakeEngine]) -> None:
    for engine in pool:
        engine.faults.append(Fault("/start_weight_update", "status", status=500))
    with pytest.raises(RefitFailed, match=r"2\.7 failed on all 3 engines; first e0 in phase start: .*500") as caught:
        refit(pool)
    assert broken(caught.value) == {"e0": "start", "e1": "start", "e2": "start"}


def test_bug_of_ours_ends_the_refit_with_the_engines_resumed(pool: list[FakeEngine]) -> None:
    class Buggy(EngineControl):
        def pause(self, mode: str, clear_cache: bool, deadline_seconds: float) -> None:
            super().pause(mode, clear_cache, deadline_seconds)
            if self.name == "e1":
                while not all("/pause" in engine.calls for engine in pool):
                    time.sleep(0.001)
                raise ZeroDivisionError

    pool[2].faults.append(Fault("/pause", "delay", seconds=0.3))
    addresses = [EngineAddress(f"e{number}", engine.url) for number, engine in enumerate(pool)]
    with pytest.raises(ZeroDivisionError):
        refit_weights(WEIGHTS, addresses, STAMP, HttpTransfer(), SETTINGS, canary=None, control=Buggy)
    assert all("/pause" in engine.calls for engine in pool)
    assert all("/start_weight_update" not in engine.calls for engine in pool)
    assert not any(engine.is_paused for engine in pool)


def test_call_that_ignores_its_deadline_is_given_up(pool: list[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "GRACE_SECONDS", 0.1)

    class Deaf(HttpTransfer):
        def send(self, engine: EngineControl, weights: Weights, deadline_seconds: float) -> None:
            if engine.name == "e0":
                time.sleep(deadline_seconds + 1.5)

    result = refit(pool, Deaf(), transfer_seconds=0.2)
    assert broken(result) == {"e0": "transfer"}
    assert result.refitted == ("e1", "e2")


@pytest.mark.parametrize(
    "weights",
    [
        WEIGHTS[:1],
        [*WEIGHTS, WEIGHTS[0]],
        [WEIGHTS[0], ("lm_head.weight", torch.full((4, 2), math.inf))],
    ],
)
def test_bad_weights_are_refused_before_any_engine_is_touched(pool: list[FakeEngine], weights: Any) -> None:
    addresses = [EngineAddress("e0", pool[0].url)]
    with pytest.raises(ManifestError):
        refit_weights(weights, addresses, STAMP, HttpTransfer(), SETTINGS, canary=None)
    assert pool[0].calls == []


def test_refit_without_engines_is_refused() -> None:
    with pytest.raises(ValueError, match="no engine"):
        refit([])


@pytest.mark.parametrize("phases", range(7))
def test_a_fenced_trainer_does_nothing_more_to_any_engine(pool: list[FakeEngine], phases: int) -> None:
    asked = 0

    def fence() -> None:
        nonlocal asked
        asked += 1
        if asked > phases:
            raise Fenced("a newer attempt owns the run")

    address = EngineAddress("e0", pool[0].url)
    with pytest.raises(Fenced):
        refit_weights(WEIGHTS, [address], STAMP, HttpTransfer(), SETTINGS, canary=CANARY, fence=fence)
    last = [0, 2, 3, 4, 5, 7, 8][phases]  # calls of the phases before: connect and finish make two each
    assert pool[0].calls == REFIT_ORDER[:last]
