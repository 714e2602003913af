"""The refit on real vLLM engines: exact for tied and untied heads, in mid-request, and when an engine dies."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import pytest
import torch

from grpo_core.refit.canary import Canary
from grpo_core.refit.control import ControlError, EngineAddress, EngineControl
from grpo_core.refit.coordinator import RefitFailed, RefitResult, refit_weights
from grpo_core.refit.digest import ManifestError
from grpo_core.refit.gloo import GlooTransfer
from grpo_core.refit.transfer import Transfer, Weights
from grpo_core.rollout.engine import EngineClient
from grpo_core.rollout.wire import InvalidGeneration
from grpo_core.trajectory import Stamp, Turn
from tests.grpo_core.refit.real import (
    SETTINGS,
    Sampling,
    canary_of,
    load_of,
    logprobs_of,
    randomise,
    refit_fifty_times,
    weights_of,
)
from tests.turns import one_turn
from tests.vllm_engine import RunningEngine, running_engines, write_tiny_model

pytestmark = pytest.mark.vllm


@dataclass
class Pool:
    """The engines by name, the model each was started from, and the link to them."""

    engines: dict[str, RunningEngine]
    models: dict[str, Any]
    transfer: GlooTransfer

    def address(self, name: str) -> EngineAddress:
        return EngineAddress(name, self.engines[name].url)

    def refit(self, name: str, stamp: Stamp, transfer: Transfer | None = None, **changes: Any) -> RefitResult:
        return refit_weights(
            weights_of(self.models[name]),
            [self.address(name)],
            stamp,
            transfer or self.transfer,
            replace(SETTINGS, **changes),
            canary=canary_of(self.models[name]),
        )


@pytest.fixture(scope="module")
def pool(vllm_engine: RunningEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """The shared engine (Qwen3, untied) and two of this module's own: one of two workers (Llama, tied), which the last
    test kills, and one for the other way to store a head (Llama, untied)."""
    from transformers import AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("engines")
    tied = write_tiny_model(directory / "tied", "llama", tied=True)
    untied = write_tiny_model(directory / "untied", "llama", tied=False)
    with (
        running_engines([tied], directory, tensor_parallel_size=2) as two_workers,
        running_engines([untied], tmp_path_factory.mktemp("untied")) as one_worker,
    ):
        engines = {"tied": two_workers[0], "untied": vllm_engine, "untied Llama": one_worker[0]}
        models = {
            name: AutoModelForCausalLM.from_pretrained(engine.model, dtype=torch.float32)
            for name, engine in engines.items()
        }
        yield Pool(engines, models, GlooTransfer())


def test_three_refits_agree_with_the_trainer_whether_the_head_is_tied_or_not(pool: Pool) -> None:
    for version in range(3):
        for name, model in pool.models.items():
            randomise(model, seed=version)
            result = pool.refit(name, Stamp(1, version))
            assert result.broken == ()
            assert result.canary[name] <= 1e-4
            assert EngineControl(pool.address(name)).weight_stamp(10) == f"1.{version}"


def test_fifty_refits_stay_exact_and_leave_no_memory_behind(pool: Pool) -> None:
    refit_fifty_times(pool.models, pool.engines, lambda name, version: pool.refit(name, Stamp(1, 10 + version)))


def test_request_across_a_refit_has_one_span_per_version_and_each_matches_its_weights(pool: Pool) -> None:
    model = pool.models["untied"]
    prompt = list(range(1, 13))

    async def straddle(weights: Any, canary: Canary, version: int) -> Turn:
        """A long request, and a refit as soon as the engine is at it."""
        async with aiohttp.ClientSession() as session:
            client = EngineClient(pool.engines["untied"].url, session=session)
            request = asyncio.create_task(
                one_turn(
                    client,
                    prompt,
                    request_id=f"straddle-{version}",
                    sampling=Sampling(),
                    max_tokens=1500,
                    seed=5,
                    stop_token_ids=[],
                    cache_salt=f"2.{version}",
                    deadline_seconds=120,
                )
            )
            while not request.done() and (await asyncio.to_thread(load_of, pool.engines["untied"]))["running"] < 1:
                await asyncio.sleep(0.005)
            engines = [pool.address("untied")]
            await asyncio.to_thread(
                refit_weights, weights, engines, Stamp(2, version + 1), pool.transfer, SETTINGS, canary=canary
            )
            return await request

    # On a fast machine the request may end before the refit begins; then it is tried again with the next versions.
    for version in range(0, 20, 2):
        randomise(model, seed=10 + version)
        pool.refit("untied", Stamp(2, version))
        old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        randomise(model, seed=11 + version)
        turn = asyncio.run(straddle(weights_of(model), canary_of(model), version))
        if len(turn.spans) == 2:
            break
    assert [(span.attempt, span.version) for span in turn.spans] == [(2, version), (2, version + 1)]
    switch = turn.spans[0].end
    new_scores = logprobs_of(model, prompt + turn.output_ids)[len(prompt) - 1 :]
    model.load_state_dict(old)
    old_scores = logprobs_of(model, prompt + turn.output_ids)[len(prompt) - 1 :]
    difference = [abs(a - b) for a, b in zip(turn.logprobs, old_scores[:switch] + new_scores[switch:], strict=True)]
    assert max(difference) <= 1e-4
    assert max(abs(a - b) for a, b in zip(old_scores, new_scores, strict=True)) > 1


def test_siblings_are_reproducible_distinct_and_carry_the_trainers_logprobs(pool: Pool) -> None:
    randomise(pool.models["untied"], seed=20)
    pool.refit("untied", Stamp(3, 0))
    prompt = [5, 6, 7, 8]

    async def siblings(salt: str) -> list[Turn]:
        async with aiohttp.ClientSession() as session:
            return await EngineClient(pool.engines["untied"].url, session=session).generate_many(
                prompt,
                8,
                request_id=salt,
                sampling=Sampling(temperature=0.7),
                max_tokens=12,
                seed=9,
                stop_token_ids=[0],
                cache_salt=salt,
                deadline_seconds=60,
            )

    first, second = asyncio.run(siblings("a")), asyncio.run(siblings("b"))
    assert [turn.output_ids for turn in first] == [turn.output_ids for turn in second]
    assert len({tuple(turn.output_ids) for turn in first}) == 8
    for turn in first:
        ids = prompt + turn.output_ids
        with torch.no_grad():
            logits = pool.models["untied"](torch.tensor([ids])).logits[0].double() / 0.7
        table = torch.log_softmax(logits, dim=-1)
        own = [float(table[len(prompt) - 1 + i, token]) for i, token in enumerate(turn.output_ids)]
        assert max(abs(a - b) for a, b in zip(own, turn.logprobs, strict=True)) <= 1e-4


def test_more_seeded_prompts_than_one_step_can_read_are_served(pool: Pool) -> None:
    async def burst() -> list[Turn]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            client = EngineClient(pool.engines["untied"].url, session=session)
            requests = [
                one_turn(
                    client,
                    [1 + (number + i) % 127 for i in range(200)],
                    request_id=f"burst {number}",
                    sampling=Sampling(),
                    max_tokens=2,
                    seed=number,
                    stop_token_ids=[],
                    cache_salt="burst",
                    deadline_seconds=60,
                )
                for number in range(30)
            ]
            return await asyncio.gather(*requests)

    randomise(pool.models["untied"], seed=21)
    pool.refit("untied", Stamp(3, 1))
    assert len(asyncio.run(burst())) == 30


def test_cached_prefixes_serve_their_own_version_only(pool: Pool) -> None:
    async def hits_of(stamp: str) -> float:
        async with aiohttp.ClientSession() as session:
            client = EngineClient(pool.engines["untied"].url, session=session)
            before = await asyncio.to_thread(load_of, pool.engines["untied"])
            await one_turn(
                client,
                list(range(1, 101)),
                request_id="prefix",
                sampling=Sampling(),
                max_tokens=1,
                seed=1,
                stop_token_ids=[],
                cache_salt=stamp,
                deadline_seconds=60,
            )
            after = await asyncio.to_thread(load_of, pool.engines["untied"])
            return after["prefix_hits"] - before["prefix_hits"]

    pool.refit("untied", Stamp(3, 2))
    assert [asyncio.run(hits_of("3.2")), asyncio.run(hits_of("3.2"))] == [0, 96]
    pool.refit("untied", Stamp(3, 3))
    assert [asyncio.run(hits_of("3.3")), asyncio.run(hits_of("3.3"))] == [0, 96]


def test_with_kept_caches_a_request_that_waited_through_a_refit_is_generated_again(pool: Pool) -> None:
    """Its first token would come from keys and values of the old weights."""
    model, prompt = pool.models["untied"], list(range(1, 65))
    randomise(model, seed=40)
    pool.refit("untied", Stamp(3, 4), clear_cache=False)
    engine = EngineControl(pool.address("untied"))

    async def ask(salt: str) -> Turn:
        async with aiohttp.ClientSession() as session:
            return await one_turn(
                EngineClient(pool.engines["untied"].url, session=session, kept_caches=True),
                prompt,
                request_id=f"kept {salt}",
                sampling=Sampling(),
                max_tokens=4,
                seed=1,
                stop_token_ids=[],
                cache_salt=salt,
                deadline_seconds=120,
            )

    async def straddle() -> Turn:
        await ask("3.4")
        await asyncio.to_thread(engine.pause, "keep", False, 60)
        waiting = asyncio.create_task(ask("3.4"))
        await asyncio.sleep(1.0)
        randomise(model, seed=41)
        await asyncio.to_thread(pool.refit, "untied", Stamp(3, 5), clear_cache=False)
        return await waiting

    with pytest.raises(InvalidGeneration, match=r"began a turn with version 3\.5 on the cache of 3\.4"):
        asyncio.run(straddle())
    turn = asyncio.run(ask("3.5"))
    own = logprobs_of(model, prompt + turn.output_ids)[len(prompt) - 1 :]
    assert max(abs(a - b) for a, b in zip(own, turn.logprobs, strict=True)) <= 1e-4


def test_update_with_a_tensor_missing_is_refused_by_the_engine_and_leaves_it_usable(pool: Pool) -> None:
    name = "untied"
    randomise(pool.models[name], seed=30)
    pool.refit(name, Stamp(4, 0))
    engine = EngineControl(pool.address(name))
    before = canary_of(pool.models[name])
    weights = [
        pair for pair in weights_of(pool.models[name]) if not pair[0].endswith("layers.1.self_attn.k_proj.weight")
    ]
    engine.pause("keep", True, 30)
    engine.start(30)
    with pytest.raises(ControlError, match="k_proj"):
        pool.transfer.send(engine, Weights.of(weights, digests=False), 30)
    engine.resume(30)
    scores = engine.score(list(before.token_ids), "after the refusal", 30)
    assert max(abs(a - b) for a, b in zip(scores, before.logprobs, strict=True)) <= 1e-4


def test_damaged_tensor_is_refused_by_its_digest_and_leaves_the_engine_usable(pool: Pool) -> None:
    name = "untied"
    randomise(pool.models[name], seed=31)
    pool.refit(name, Stamp(4, 1))
    engine = EngineControl(pool.address(name))
    before = canary_of(pool.models[name])
    weights = Weights.of([(key, tensor.clone()) for key, tensor in weights_of(pool.models[name])], digests=True)
    weights.tensors[3][1][0, 0] += 1.0
    engine.pause("keep", True, 30)
    engine.start(30)
    with pytest.raises(ControlError, match="damaged"):
        pool.transfer.send(engine, weights, 30)
    engine.resume(30)
    scores = engine.score(list(before.token_ids), "after the damage", 30)
    assert max(abs(a - b) for a, b in zip(scores, before.logprobs, strict=True)) <= 1e-4
    assert pool.refit(name, Stamp(4, 2)).canary[name] <= 1e-4


def test_weights_that_are_not_finite_never_reach_the_engine(pool: Pool) -> None:
    weights = [(key, tensor.clone()) for key, tensor in weights_of(pool.models["tied"])]
    weights[2][1][0, 0] = float("nan")
    stamp = EngineControl(pool.address("tied")).weight_stamp(10)
    with pytest.raises(ManifestError, match=weights[2][0]):
        refit_weights(weights, [pool.address("tied")], Stamp(9, 9), pool.transfer, SETTINGS, canary=None)
    assert EngineControl(pool.address("tied")).weight_stamp(10) == stamp


def test_new_trainer_takes_over_an_engine_whose_group_belongs_to_a_dead_one(pool: Pool) -> None:
    randomise(pool.models["tied"], seed=40)
    EngineControl(pool.address("tied")).pause("keep", True, 30)
    result = pool.refit("tied", Stamp(5, 0), transfer=GlooTransfer())
    assert result.canary["tied"] <= 1e-4
    pool.transfer.close("tied")


class KillingTransfer(GlooTransfer):
    """Kills an engine's worker while the weights are on their way to it."""

    def __init__(self, victim: RunningEngine) -> None:
        super().__init__()
        self._victim = victim

    def send(self, engine: EngineControl, weights: Weights, deadline_seconds: float) -> None:
        if engine.url == self._victim.url:
            threading.Timer(0.1, os.killpg, (self._victim.process.pid, signal.SIGKILL)).start()
            weights = replace(weights, tensors=self._slowly(weights))  # type: ignore[arg-type]
        super().send(engine, weights, deadline_seconds)

    @staticmethod
    def _slowly(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in weights.tensors:
            time.sleep(0.02)
            yield pair


def test_engine_killed_in_the_transfer_is_reported_and_the_other_goes_on(pool: Pool) -> None:
    """The last test: it costs an engine."""
    survivor, victim = "untied", "tied"
    randomise(pool.models[survivor], seed=50)
    transfer = KillingTransfer(pool.engines[victim])
    addresses = [pool.address(survivor), pool.address(victim)]
    result = refit_weights(
        weights_of(pool.models[survivor]),
        addresses,
        Stamp(6, 0),
        transfer,
        SETTINGS,
        canary=canary_of(pool.models[survivor]),
    )
    assert result.refitted == (survivor,)
    assert [(broken.name, broken.phase) for broken in result.broken] == [(victim, "transfer")]
    assert "in time" not in result.broken[0].cause, "it is known to be dead before the deadline"
    assert result.canary[survivor] <= 1e-4
    with pytest.raises(RefitFailed, match=victim):
        refit_weights(
            weights_of(pool.models[victim]), [pool.address(victim)], Stamp(6, 1), transfer, SETTINGS, canary=None
        )
