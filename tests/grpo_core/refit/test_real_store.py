"""A real vLLM engine fetches its weights from the store, whole and as differences, and serves adapters by their stamp."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from grpo_core.refit.adapters import Adapter, refit_adapter
from grpo_core.refit.control import EngineAddress, EngineControl
from grpo_core.refit.coordinator import RefitFailed, RefitResult, refit_weights
from grpo_core.refit.store import StoreAddress, StoreTransfer
from grpo_core.rollout.engine import EngineClient
from grpo_core.trajectory import Stamp, Turn
from storage import layout
from storage.objects import ObjectStore
from tests.grpo_core.refit.real import SETTINGS, Sampling, canary_of, logprobs_of, randomise, weights_of
from tests.vllm_engine import RunningEngine, running_engines, write_tiny_model

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


def test_adapters_are_versions_that_requests_name(stage: Stage) -> None:
    stage.refit(stage.transfer(), Stamp(5, 0))
    engine = EngineControl(EngineAddress("e0", stage.engine.url))

    async def ask(stamp: str) -> Turn:
        async with aiohttp.ClientSession() as session:
            client = EngineClient(stage.engine.url, session=session, adapters=True)
            return await client.generate(
                [5, 6, 7, 8], request_id=f"adapter {stamp}", sampling=Sampling(), max_tokens=8, seed=3, stop_token_ids=[],
                cache_salt=stamp, deadline_seconds=120,
            )  # fmt: skip

    for version in range(1, 5):
        adapter = adapter_of(stage.model, seed=50 + version)
        policy = merged(stage.model, adapter)
        result = refit_adapter(
            adapter,
            [EngineAddress("e0", stage.engine.url)],
            Stamp(5, version),
            stage.adapters,
            SETTINGS,
            canary=canary_of(policy),
        )
        assert result.broken == ()
        assert result.canary["e0"] <= 1e-4
        turn = asyncio.run(ask(f"5.{version}"))
        assert [(span.attempt, span.version, span.start, span.end) for span in turn.spans] == [(5, version, 0, 8)]
        own = logprobs_of(policy, [5, 6, 7, 8, *turn.output_ids])[3:]
        assert max(abs(a - b) for a, b in zip(own, turn.logprobs, strict=True)) <= 1e-4
    assert sorted(engine.adapters(30)) == ["5.3", "5.4"]
    assert sorted(path.name for path in stage.adapters.iterdir()) == ["5.3", "5.4"]
