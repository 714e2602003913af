"""An adapter is a version of its own: loaded beside the others, named by requests, and gone when nobody names it."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from safetensors.torch import load_file

from grpo_core.refit.adapters import (
    Adapter,
    Base,
    engines_without_base,
    refit_adapter,
    unloadable,
    write_adapter,
)
from grpo_core.refit.canary import Canary
from grpo_core.refit.control import EngineAddress, EngineControl, parse_adapters_in_use
from grpo_core.refit.coordinator import RefitFailed, RefitResult, RefitSettings
from grpo_core.refit.digest import ManifestError
from grpo_core.refit.transfer import TransferError, Weights
from grpo_core.trajectory import Stamp
from storage.errors import Fenced
from tests.fake_engine import GENERATE, FakeEngine, Fault
from tests.grpo_core.refit.real import SETTINGS

CANARY = Canary((1, 2, 3), (-math.log(128), -math.log(128)), tolerance=1e-4)
LAYER = "model.layers.0.self_attn.q_proj"


def adapter(rank: int = 2, value: float = 1.0) -> Adapter:
    return Adapter({LAYER: (torch.full((rank, 4), value), torch.ones(6, rank))}, rank=2, alpha=4.0, base_model="policy")


@pytest.fixture
def pool() -> Iterator[list[FakeEngine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(FakeEngine(seconds_per_token=0.01)) for _ in range(2)]


def refit(
    pool: list[FakeEngine],
    version: int,
    directory: Path,
    canary: Canary | None = CANARY,
    settings: RefitSettings = SETTINGS,
) -> RefitResult:
    addresses = [EngineAddress(f"e{number}", engine.url) for number, engine in enumerate(pool)]
    return refit_adapter(adapter(), addresses, Stamp(1, version), directory, settings, canary=canary)


def test_engines_load_a_version_beside_the_others_without_a_pause(pool: list[FakeEngine], tmp_path: Path) -> None:
    result = refit(pool, 0, tmp_path)
    assert result.refitted == ("e0", "e1")
    assert list(result.seconds) == ["prepare", "transfer", "canary", "finish"]
    assert result.bytes == sum(file.stat().st_size for file in (tmp_path / "1.0").iterdir())
    for engine in pool:
        canary = [GENERATE] * len(CANARY.logprobs)
        assert engine.calls == ["/v1/models", "/v1/load_lora_adapter", *canary, "/v1/models", "/metrics"]
        assert engine.adapters == {"1.0": str(tmp_path / "1.0")}
        asked = [body for path, body in engine.bodies if path == GENERATE]
        assert {body["model"] for body in asked} == {"1.0"}
        assert sorted(body["token_ids"] for body in asked) == [[1], [1, 2]]
        # A score of the whole prompt would kill an engine on CPUs that has other requests.
        assert not any("prompt_logprobs" in body["sampling_params"] for body in asked)


def test_requests_end_before_a_version_is_loaded_where_they_are_to_be_drained(
    pool: list[FakeEngine], tmp_path: Path
) -> None:
    refit(pool, 0, tmp_path)
    running: list[int] = []
    control = pool[0]._control

    def noting(path: str, *arguments: Any) -> Any:
        running.extend([pool[0]._running] * (path == "/v1/load_lora_adapter"))
        return control(path, *arguments)

    pool[0]._control = noting  # type: ignore[method-assign]
    body = {"token_ids": [1], "model": "1.0", "sampling_params": {"max_tokens": 30, "seed": 1}}
    request = threading.Thread(target=lambda: requests.post(pool[0].url + GENERATE, json=body, timeout=30))
    request.start()
    while pool[0].calls.count(GENERATE) < 1 + len(CANARY.logprobs):
        pass
    pool[0].calls.clear()
    result = refit(pool, 1, tmp_path, settings=replace(SETTINGS, pause_mode="wait"))
    request.join(30)
    assert (result.refitted, running) == (("e0", "e1"), [0])
    assert pool[0].calls[:4] == ["/pause", "/v1/models", "/v1/load_lora_adapter", "/resume"]
    assert [body for path, body in pool[0].bodies if path == "/pause"] == [{"mode": "wait", "clear_cache": "false"}]
    assert not pool[0].is_paused


@pytest.mark.parametrize(("path", "phase"), [("/pause", "pause"), ("/v1/load_lora_adapter", "transfer")])
def test_drained_engines_are_resumed_whatever_came_of_the_loading(
    pool: list[FakeEngine], tmp_path: Path, path: str, phase: str
) -> None:
    pool[1].faults.append(Fault(path, "status"))
    result = refit(pool, 0, tmp_path, settings=replace(SETTINGS, pause_mode="wait"))
    assert (result.refitted, [(broken.name, broken.phase) for broken in result.broken]) == (("e0",), [("e1", phase)])
    assert [engine.calls.count("/resume") for engine in pool] == [1, 1]


def test_the_newest_adapters_stay_and_the_others_go(pool: list[FakeEngine], tmp_path: Path) -> None:
    for version in range(4):
        refit(pool, version, tmp_path)
    assert [sorted(engine.adapters) for engine in pool] == [["1.2", "1.3"]] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.2", "1.3"]


def test_an_adapter_that_a_request_names_is_not_unloaded(pool: list[FakeEngine], tmp_path: Path) -> None:
    refit(pool, 0, tmp_path)
    body = {"token_ids": [1], "model": "1.0", "sampling_params": {"max_tokens": 300, "seed": 1}}
    request = threading.Thread(target=lambda: requests.post(pool[0].url + GENERATE, json=body, timeout=30))
    request.start()
    while pool[0].calls.count(GENERATE) < 1 + len(CANARY.logprobs):
        pass
    for version in (1, 2, 3):
        refit(pool, version, tmp_path)
    assert sorted(pool[0].adapters) == ["1.0", "1.2", "1.3"]
    assert sorted(pool[1].adapters) == ["1.2", "1.3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.0", "1.2", "1.3"]
    request.join(30)
    refit(pool, 4, tmp_path)
    assert sorted(pool[0].adapters) == ["1.3", "1.4"]


def test_an_engine_that_joins_late_is_given_the_adapter_that_is_there(pool: list[FakeEngine], tmp_path: Path) -> None:
    refit(pool[:1], 0, tmp_path)
    assert refit(pool, 0, tmp_path).refitted == ("e0", "e1")
    assert pool[0].calls.count("/v1/load_lora_adapter") == 1


def test_what_another_engine_has_loaded_is_not_deleted_for_one_that_joins_late(
    pool: list[FakeEngine], tmp_path: Path
) -> None:
    refit(pool[:1], 0, tmp_path)
    body = {"token_ids": [1], "model": "1.0", "sampling_params": {"max_tokens": 200, "seed": 1}}
    request = threading.Thread(target=lambda: requests.post(pool[0].url + GENERATE, json=body, timeout=30))
    request.start()
    while pool[0].calls.count(GENERATE) < 1 + len(CANARY.logprobs):
        pass
    for version in (1, 2):
        refit(pool[:1], version, tmp_path)
    assert refit(pool[1:], 2, tmp_path).refitted == ("e0",)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.0", "1.1", "1.2"]
    request.join(30)


def test_adapters_of_dead_attempts_go_at_the_first_refit_of_the_next(pool: list[FakeEngine], tmp_path: Path) -> None:
    for version in (6, 7):
        refit(pool, version, tmp_path)
    (tmp_path / "1.8.part").mkdir()
    addresses = [EngineAddress("e0", pool[0].url)]
    refit_adapter(adapter(), addresses, Stamp(2, 7), tmp_path, SETTINGS, canary=CANARY)
    assert sorted(pool[0].adapters) == ["2.7"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2.7"]


@dataclass
class Transfer:
    """Moves nothing; says in `log` whom it was asked to serve."""

    log: list[str] = field(default_factory=list)
    concurrent: bool = True
    broken: str = ""

    def prepare(self, weights: Weights, stamp: Stamp) -> int:
        self.log.append(f"prepare {stamp}")
        return weights.bytes

    def is_open(self, engine: str) -> bool:
        return True

    def open(self, engine: EngineControl, deadline_seconds: float) -> None:
        raise AssertionError("it is open")

    def send(self, engine: EngineControl, weights: Weights, deadline_seconds: float) -> None:
        self.log.append(f"send {engine.name}")
        if engine.name == self.broken:
            raise TransferError("gone")

    def close(self, engine: str) -> None:
        self.log.append(f"close {engine}")


BASE = [("lm_head.weight", torch.ones(3, 2)), ("model.embed_tokens.weight", torch.ones(3, 2))]


def refit_with_base(pool: list[FakeEngine], version: int, directory: Path, transfer: Transfer) -> RefitResult:
    addresses = [EngineAddress(f"e{number}", engine.url) for number, engine in enumerate(pool)]
    lacking = engines_without_base(addresses, 1, 5)
    return refit_adapter(
        adapter(),
        addresses,
        Stamp(1, version),
        directory,
        SETTINGS,
        canary=CANARY,
        base=Base(BASE, lacking, transfer),
    )


def test_an_engine_is_given_the_base_before_its_first_adapter_and_again_when_it_lost_it(
    pool: list[FakeEngine], tmp_path: Path
) -> None:
    transfer = Transfer()
    first = refit_with_base(pool, 0, tmp_path, transfer)
    assert first.refitted == ("e0", "e1") and first.bytes > 48
    assert sorted(transfer.log[1:]) == ["send e0", "send e1"]
    order = pool[0].calls
    assert order.index("/resume") < order.index("/v1/load_lora_adapter") < order.index(GENERATE)
    assert refit_with_base(pool, 1, tmp_path, transfer).refitted == ("e0", "e1")
    assert len(transfer.log) == 3 and pool[0].calls.count("/pause") == 1, "the base is given once"
    pool[1].restart()
    refit_with_base(pool, 2, tmp_path, transfer)
    assert transfer.log[3:] == ["prepare 1.2", "send e1"]
    assert sorted(pool[0].adapters) == ["1.1", "1.2"] and sorted(pool[1].adapters) == ["1.2"]


def test_an_engine_that_fails_with_the_base_gets_no_adapter(pool: list[FakeEngine], tmp_path: Path) -> None:
    result = refit_with_base(pool, 0, tmp_path, Transfer(broken="e1"))
    assert result.refitted == ("e0",)
    assert [(broken.name, broken.phase) for broken in result.broken] == [("e1", "transfer")]
    assert pool[1].adapters == {} and pool[1].is_paused
    with pytest.raises(RefitFailed, match="failed on all 1 engines; first e0 in phase transfer: gone"):
        pool[0].restart()
        refit_with_base(pool[:1], 1, tmp_path, Transfer(broken="e0"))


@pytest.mark.parametrize(("stamp", "lacks"), [("default", True), ("1.3", False), ("2.0", True), ("0.9", True)])
def test_the_base_of_an_engine_is_known_from_a_stamp_of_this_attempt(
    pool: list[FakeEngine], stamp: str, lacks: bool
) -> None:
    pool[0].version = stamp
    pool[1].die()
    addresses = [EngineAddress(f"e{number}", engine.url) for number, engine in enumerate(pool)]
    lacking = [engine.name for engine in engines_without_base(addresses, 1, 5)]
    assert lacking == ["e0"] * lacks + ["e1"], "one that does not answer lacks it too"


def test_a_fenced_trainer_touches_no_engine(pool: list[FakeEngine], tmp_path: Path) -> None:
    def fence() -> None:
        raise Fenced("a newer attempt owns the run")

    addresses = [EngineAddress("e0", pool[0].url)]
    with pytest.raises(Fenced):
        refit_adapter(adapter(), addresses, Stamp(1, 0), tmp_path, SETTINGS, canary=CANARY, fence=fence)
    assert pool[0].calls == []


@pytest.mark.parametrize(
    ("fault", "phase"),
    [
        (Fault("/v1/load_lora_adapter", "status", status=404), "transfer"),
        (Fault("/v1/load_lora_adapter", "die"), "transfer"),
        (Fault(GENERATE, "status", status=500), "canary"),
        (Fault("/v1/models", "reset"), "transfer"),
        (Fault("/v1/models", "hang"), "transfer"),
        (Fault("/v1/models", "garbage", text='{"data": [3]}'), "transfer"),
        (Fault("/v1/load_lora_adapter", "hang"), "transfer"),
        (Fault(GENERATE, "hang"), "canary"),
        (Fault("/metrics", "hang"), "finish"),
    ],
)
def test_an_engine_that_fails_is_reported_and_the_other_goes_on(
    pool: list[FakeEngine], tmp_path: Path, fault: Fault, phase: str
) -> None:
    pool[1].faults.append(replace(fault))
    short = 1.0 if fault.kind == "hang" else 60.0
    settings = replace(
        SETTINGS, start_seconds=short, transfer_seconds=short, finish_seconds=short, canary_seconds=short
    )
    result = refit(pool, 0, tmp_path, settings=settings)
    assert result.refitted == ("e0",)
    assert [(broken.name, broken.phase) for broken in result.broken] == [("e1", phase)]


def test_an_adapter_that_computes_something_else_is_broken(pool: list[FakeEngine], tmp_path: Path) -> None:
    for engine in pool:
        engine.score = lambda ids: [-1.0] * (len(ids) - 1)
    with pytest.raises(RefitFailed, match=r"1\.0 failed on all 2 engines; first e0 in phase canary"):
        refit(pool, 0, tmp_path)
    assert all(engine.is_paused for engine in pool)


def test_an_adapter_is_written_as_peft_writes_it(tmp_path: Path) -> None:
    directory = write_adapter(adapter(), tmp_path / "1.0")
    tensors = load_file(directory / "adapter_model.safetensors")
    names = [f"base_model.model.{LAYER}.lora_{letter}.weight" for letter in "AB"]
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {names[0]: (2, 4), names[1]: (6, 2)}
    config = json.loads((directory / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 4.0, ["q_proj"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.0"]


@pytest.mark.parametrize("bad", [adapter(rank=3), adapter(value=math.nan)])
def test_a_bad_adapter_is_refused_before_any_engine_hears_of_it(
    pool: list[FakeEngine], tmp_path: Path, bad: Adapter
) -> None:
    with pytest.raises(ManifestError, match=LAYER):
        refit_adapter(bad, [EngineAddress("e0", pool[0].url)], Stamp(1, 0), tmp_path, SETTINGS, canary=None)
    assert pool[0].calls == []
    with pytest.raises(ValueError, match="no engine"):
        refit_adapter(adapter(), [], Stamp(1, 0), tmp_path, replace(SETTINGS), canary=None)


@pytest.mark.parametrize(
    ("loaded", "in_use", "attempt", "gone"),
    [
        ([], [], 1, []),
        (["1.8", "1.9"], [], 1, []),
        (["1.8", "1.10", "1.9"], [], 1, ["1.8"]),
        (["1.8", "1.10", "1.9", "1.7"], ["1.8"], 1, ["1.7"]),
        (["somebody's", "1.1", "1.2", "2.0"], [], 2, ["1.1", "1.2"]),
        (["1.1", "1.2", "2.0"], ["1.2"], 2, ["1.1"]),
        (["1.1", "2.0"], [], 1, []),
    ],
)
def test_what_is_unloaded_is_ours_old_and_unused(
    loaded: list[str], in_use: list[str], attempt: int, gone: list[str]
) -> None:
    assert unloadable(loaded, in_use, attempt) == gone


def test_adapters_in_use_are_those_of_the_newest_sample() -> None:
    def sample(running: str, waiting: str, at: float) -> str:
        labels = f'max_lora="4",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
        return f"vllm:lora_requests_info{{{labels}}} {at}\n"

    text = sample("1.1,1.2", "1.3", 2e9) + sample("1.0", "", 1e9) + "vllm:other 3\n"
    assert parse_adapters_in_use(text) == {"1.1", "1.2", "1.3"}
    assert parse_adapters_in_use("") == frozenset()


def test_workers_answer_a_method_of_theirs() -> None:
    with FakeEngine(workers=2, staged={"a": 1}) as engine:
        control = EngineControl(EngineAddress("e0", engine.url))
        assert control.call_workers("forebay_staged", 5) == [{"a": 1}] * 2
        assert engine.bodies[-1][1]["method"] == "forebay_staged"


def test_the_key_of_the_environment_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    sent: list[Any] = []

    def request(method: str, url: str, **rest: Any) -> Any:
        sent.append(rest["headers"])
        raise requests.ConnectionError("enough")

    monkeypatch.setattr(requests, "request", request)
    with pytest.raises(Exception, match="enough"):
        EngineControl(EngineAddress("e0", "http://127.0.0.1:1")).weight_stamp(1)
    assert sent == [{"Authorization": "Bearer secret"}]
