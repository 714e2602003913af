"""A real vLLM engine fetches its weights from the store, whole and as differences,
and serves adapters by their stamp."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from flows.examination import fault_of
from flows.probe import examine
from grpo_core.config import RunConfig
from grpo_core.refit.adapters import Adapter, Base, engines_without_base, refit_adapter
from grpo_core.refit.control import EngineAddress, EngineControl
from grpo_core.refit.coordinator import RefitFailed, RefitResult, refit_weights
from grpo_core.refit.store import StoreAddress, StoreTransfer
from grpo_core.rollout.engine import EngineClient
from grpo_core.trajectory import Stamp, Turn, VersionSpan
from storage import layout
from storage.objects import ObjectStore
from tests.grpo_core.refit.real import (
    SETTINGS,
    Sampling,
    canary_of,
    logprobs_of,
    randomise,
    refit_fifty_times,
    weights_of,
)
from tests.turns import one_turn
from tests.vllm_engine import CONTEXT, RunningEngine, running_engines, write_tiny_model

pytestmark = pytest.mark.vllm

RANK = 8


@dataclass
class Stage:
    engine: RunningEngine
    model: Any
    store: ObjectStore
    shelf: Path
    adapters: Path

    def transfer(self, full_every: int = 4) -> StoreTransfer:
        address = StoreAddress(str(self.store.local_path("")), {}, "fsspec", str(self.shelf))
        return StoreTransfer(self.store, address, full_every=full_every, fence=lambda: None)

    def refit(self, transfer: StoreTransfer, stamp: Stamp, **changes: Any) -> RefitResult:
        return refit_weights(
            weights_of(self.model),
            [EngineAddress("e0", self.engine.url)],
            stamp,
            transfer,
            replace(SETTINGS, **changes),
            canary=canary_of(self.model),
        )


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    from transformers import AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("store")
    path = write_tiny_model(directory / "model", "qwen2", tied=True)
    with running_engines([path], directory, transfer="store", lora_rank=RANK) as engines:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        store = ObjectStore.open(str(directory / "run"))
        yield Stage(engines[0], model, store, directory / "shelf", directory / "adapters")


def step(model: Any, seed: int) -> None:
    """A small change of every weight, as an optimizer step makes."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=draw))


def test_an_engine_says_how_it_was_started(stage: Stage) -> None:
    model = {"dtype": "float32", "context_length": CONTEXT, "lora": {"rank": RANK}}
    for backend, fault in (("store", None), ("gloo", "receives weights by store")):
        refit = {"backend": backend, "adapter_only": True}
        config = RunConfig.model_validate({"model": model, "refit": refit})
        seen = examine(stage.engine.url, partial(fault_of, config=config))
        assert seen.healthy and (seen.fault is None if fault is None else fault in str(seen.fault))


def test_full_versions_and_differences_arrive_exactly(stage: Stage) -> None:
    transfer = stage.transfer()
    randomise(stage.model, seed=1)
    for version in range(6):
        result = stage.refit(transfer, Stamp(1, version))
        assert result.canary["e0"] <= 1e-4
        key = layout.weights(1, version) + ("weights" if version in (0, 4) else "delta") + ".safetensors"
        assert stage.store.exists(key)
        assert result.bytes == sum(
            map(stage.store.size, stage.store.list(layout.weights(1, version)))
        ) - stage.store.size(layout.weights_digests(1, version))
        step(stage.model, seed=version)


def test_an_engine_that_joins_late_follows_the_chain_from_the_newest_full_version(stage: Stage) -> None:
    transfer = stage.transfer()
    for version in range(3):
        if version < 2:
            transfer.prepare(_weights(stage.model), Stamp(2, version))
            step(stage.model, seed=20 + version)
    result = stage.refit(transfer, Stamp(2, 2))
    assert result.canary["e0"] <= 1e-4
    assert stage.refit(transfer, Stamp(2, 2)).refitted == ("e0",)


def test_a_version_that_is_damaged_in_the_store_leaves_the_engine_as_it_was(stage: Stage) -> None:
    transfer = stage.transfer()
    stage.refit(transfer, Stamp(3, 0))
    before = canary_of(stage.model)
    step(stage.model, seed=30)
    transfer.prepare(_weights(stage.model), Stamp(3, 1))
    key = layout.weights(3, 1) + "delta.safetensors"
    data = bytearray(stage.store.get(key))
    data[-1] ^= 1
    stage.store.put(key, bytes(data))
    with pytest.raises(RefitFailed, match=r"phase connect: .*delta\.safetensors is missing or altered"):
        stage.refit(transfer, Stamp(3, 1))
    engine = EngineControl(EngineAddress("e0", stage.engine.url))
    assert engine.weight_stamp(10) == "3.0"
    scores = engine.score(list(before.token_ids), "after the damage", 60)
    assert max(abs(a - b) for a, b in zip(scores, before.logprobs, strict=True)) <= 1e-4


def _weights(model: Any) -> Any:
    from grpo_core.refit.transfer import Weights

    return Weights.of(weights_of(model), digests=False)


def adapter_of(model: Any, seed: int) -> Adapter:
    draw = torch.Generator().manual_seed(seed)
    layers = {}
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            outputs, inputs = parameter.shape
            a, b = torch.randn(RANK, inputs, generator=draw), torch.randn(outputs, RANK, generator=draw)
            layers[name.removesuffix(".weight")] = (0.2 * a, 0.2 * b)
    return Adapter(layers, RANK, alpha=2.0 * RANK, base_model="policy")


def merged(model: Any, adapter: Adapter) -> Any:
    import copy

    model = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, (a, b) in adapter.layers.items():
            parameters[f"{name}.weight"].add_(adapter.alpha / adapter.rank * (b @ a))
    return model


PROMPT = [5, 6, 7, 8]


# Side by side, so many long requests take longer than three refits, also where refits are slow.
LONG = 16


def ask(stage: Stage, stamp: str, tokens: int) -> Turn:
    """A turn of the adapter called `stamp`."""

    async def generate() -> Turn:
        async with aiohttp.ClientSession() as session:
            client = EngineClient(stage.engine.url, session=session, adapters=True)
            return await one_turn(
                client,
                PROMPT, request_id=f"adapter {stamp} {tokens}", sampling=Sampling(), max_tokens=tokens, seed=3, stop_token_ids=[],
                cache_salt=stamp, deadline_seconds=120,
            )  # fmt: skip

    return asyncio.run(generate())


def assert_sampled_by(policy: Any, turn: Turn, stamp: Stamp) -> None:
    """Every token is of this version, and as likely as its policy says."""
    assert turn.spans == (VersionSpan(stamp.attempt, stamp.version, 0, len(turn.output_ids)),)
    own = logprobs_of(policy, [*PROMPT, *turn.output_ids])[len(PROMPT) - 1 :]
    assert max(abs(a - b) for a, b in zip(own, turn.logprobs, strict=True)) <= 1e-4


def test_adapters_are_versions_that_requests_name(stage: Stage) -> None:
    """The base is moved once, each version while the engine is busy;
    long requests end under the one they began with."""
    address = EngineAddress("e0", stage.engine.url)
    engine, transfer = EngineControl(address), stage.transfer()
    policies: dict[int, Any] = {}

    def refit(version: int) -> RefitResult:
        adapter = adapter_of(stage.model, seed=50 + version)
        policies[version] = merged(stage.model, adapter)
        result = refit_adapter(
            adapter,
            [address],
            Stamp(5, version),
            stage.adapters,
            SETTINGS,
            canary=canary_of(policies[version]),
            base=Base(weights_of(stage.model), engines_without_base([address], 5, 30), transfer),
        )
        assert result.broken == () and result.canary["e0"] <= 1e-4
        return result

    randomise(stage.model, seed=5)
    assert "pause" in refit(1).seconds
    with ThreadPoolExecutor(LONG) as background:
        long = [background.submit(ask, stage, "5.1", 1500 + number) for number in range(LONG)]
        while "5.1" not in engine.adapters_in_use(30):
            time.sleep(0.01)
        for version in (2, 3, 4):
            assert "pause" not in refit(version).seconds
            assert_sampled_by(policies[version], ask(stage, f"5.{version}", 8), Stamp(5, version))
        assert not any(request.done() for request in long)
        assert sorted(engine.adapters(30)) == ["5.1", "5.3", "5.4"]
        for request in long:
            assert_sampled_by(policies[1], request.result(), Stamp(5, 1))
    refit(5)
    assert sorted(engine.adapters(30)) == ["5.4", "5.5"]
    assert sorted(path.name for path in stage.adapters.iterdir()) == ["5.4", "5.5"]


def test_fifty_refits_through_the_store_stay_exact_and_leave_no_memory_behind(stage: Stage) -> None:
    transfer = stage.transfer()
    refit_fifty_times(
        {"e0": stage.model}, {"e0": stage.engine}, lambda name, version: stage.refit(transfer, Stamp(9, version))
    )
