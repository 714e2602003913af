"""What happens to requests in flight and to cached keys and values through a refit,
in every combination of the two keys."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
import torch

from grpo_core.config import RunConfig
from grpo_core.refit.control import EngineAddress
from grpo_core.refit.coordinator import refit_weights
from grpo_core.rollout.engine import EngineClient
from grpo_core.rollout.wire import InvalidGeneration
from grpo_core.training.loop import refit_settings
from grpo_core.trajectory import Stamp, Turn
from tests.fake_engine import GENERATE, FakeEngine
from tests.grpo_core.refit.real import Sampling
from tests.grpo_core.refit.test_coordinator import HttpTransfer
from tests.turns import one_turn

WEIGHTS = [("lm_head.weight", torch.ones(4, 2))]
TOKENS = 40


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine(version="1.0", seconds_per_token=0.01) as running:
        yield running


def config(*, in_flight: bool, recompute: bool) -> RunConfig:
    keys = {"in_flight_weight_updates": in_flight, "recompute_kv_cache_after_weight_updates": recompute}
    return RunConfig.model_validate({"grpo": {"async_grpo": keys}})


def through_a_refit(engine: FakeEngine, run: RunConfig) -> list[Turn | BaseException]:
    """A request that is being sampled when a refit begins, and one that arrives while the engine stands still."""
    settings = replace(refit_settings(run), connect_seconds=5, pause_seconds=5, resume_seconds=5)
    kept = not run.grpo.async_grpo.recompute_kv_cache_after_weight_updates

    async def both() -> list[Any]:
        async with aiohttp.ClientSession() as session:
            client = EngineClient(engine.url, session=session, name="e0", kept_caches=kept)

            def ask(name: str) -> Any:
                return one_turn(
                    client,
                    [1, 2, 3], request_id=name, sampling=Sampling(), max_tokens=TOKENS, seed=3, stop_token_ids=[],
                    cache_salt="1.0", deadline_seconds=20,
                )  # fmt: skip

            class Arriving(HttpTransfer):
                def send(self, *arguments: Any) -> None:
                    asyncio.run_coroutine_threadsafe(arrive(), loop).result(5)
                    super().send(*arguments)

            async def arrive() -> None:
                requests.append(asyncio.create_task(ask("late")))
                while engine.calls.count(GENERATE) < 2:
                    await asyncio.sleep(0.005)

            loop = asyncio.get_running_loop()
            requests = [asyncio.create_task(ask("early"))]
            while not engine._generated:
                await asyncio.sleep(0.005)
            address = [EngineAddress("e0", engine.url)]
            await asyncio.to_thread(refit_weights, WEIGHTS, address, Stamp(1, 1), Arriving(), settings, canary=None)
            return await asyncio.gather(*requests, return_exceptions=True)

    return asyncio.run(both())


def versions(turn: Turn | BaseException) -> list[int]:
    assert isinstance(turn, Turn)
    assert turn.spans[-1].end == TOKENS
    return [span.version for span in turn.spans]


@pytest.mark.parametrize(
    ("in_flight", "recompute", "pause", "early", "late_is_exact"),
    [
        (True, True, {"mode": "keep", "clear_cache": "true"}, [0, 1], True),
        (True, False, {"mode": "keep", "clear_cache": "false"}, [0, 1], False),
        (False, True, {"mode": "wait", "clear_cache": "true"}, [0], True),
        (False, False, {"mode": "wait", "clear_cache": "false"}, [0], False),
    ],
)
def test_requests_and_caches_are_treated_as_configured(
    engine: FakeEngine, in_flight: bool, recompute: bool, pause: dict[str, str], early: list[int], late_is_exact: bool
) -> None:
    first, late = through_a_refit(engine, config(in_flight=in_flight, recompute=recompute))
    assert [body for path, body in engine.bodies if path == "/pause"] == [pause]
    assert versions(first) == early
    if late_is_exact:
        assert versions(late) == [1]
    else:
        # It would go on from a prefix that the old weights left in the cache under its salt.
        assert isinstance(late, InvalidGeneration) and late.reason == "salt"
