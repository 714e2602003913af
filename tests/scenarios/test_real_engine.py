"""The same run with a real vLLM engine: killed in the middle, continued, sound, and every refit exact."""

from __future__ import annotations

import pytest

from storage import layout
from storage.records import read_record
from tests.scenarios.conftest import MakeDriver
from tests.scenarios.run_driver import steps_done
from tests.scenarios.soundness import assert_sound, attempts

REAL_ENGINE = {
    "pool": {"python": None, "enforce_eager": True, "kv_cache_bytes": 1 << 26, "start_timeout_seconds": 400},
    "evaluation": {"at_start": True, "at_end": True, "samples": 8},
}


POLICIES = {
    "untied": {},
    "tied": {"model": {"source": {"tie_word_embeddings": True}}},
    "adapters": {"model": {"lora": {"rank": 4}}, "refit": {"adapter_only": True}},
}


@pytest.mark.vllm
@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_with_a_real_engine_survives_kill_and_refits_exactly(make_driver: MakeDriver, policy: str) -> None:
    driver = make_driver(settings={**REAL_ENGINE, **POLICIES[policy]})
    driver.start()
    driver.wait_for(steps_done(3), seconds=400)
    driver.kill("flow")
    assert driver.orphans() == []

    driver.start()
    assert driver.finish(600) == 0, driver.errors
    assert_sound(driver)
    assert attempts(driver.store) == 2
    assert "held-out reward of version 0" in driver.output and "held-out reward of version 6" in driver.output
    refits = [
        read_record(driver.store, key)
        for attempt in (1, 2)
        for key in driver.store.list(layout.refits_prefix(attempt), recursive=True)
    ]
    assert len(refits) >= 7
    assert all(difference <= 1e-4 for refit in refits for difference in refit["canary"].values())
