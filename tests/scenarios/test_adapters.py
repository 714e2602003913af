"""A policy of adapters, refitted by its adapters alone or by the weights they amount to:
killed, it comes to the same bits."""

from __future__ import annotations

from typing import Any

import pytest

from storage import layout
from storage.records import read_record
from tests.scenarios.conftest import MakeDriver
from tests.scenarios.run_driver import SYNCHRONOUS, RunDriver, checkpoint_committed, merged
from tests.scenarios.soundness import assert_same_bits, assert_sound, attempts, checkpoint_tensors

ADAPTERS: dict[str, Any] = merged(SYNCHRONOUS, {"model": {"lora": {"rank": 4, "alpha": 8.0}}})
# Two ranks, because they must agree on who is given the base.
REFITS = {"adapters": {"refit": {"adapter_only": True}, "training": {"ranks": 2}}, "merged": {}}


def refits(driver: RunDriver) -> list[dict[str, Any]]:
    """Every refit of a run, in order."""
    keys = [
        key
        for attempt in range(1, attempts(driver.store) + 1)
        for key in driver.store.list(layout.refits_prefix(attempt), recursive=True)
    ]
    return [read_record(driver.store, key) for key in sorted(keys)]


@pytest.mark.parametrize("how", REFITS)
def test_a_run_with_adapters_survives_a_kill_to_the_bit(make_driver: MakeDriver, how: str) -> None:
    settings = merged(ADAPTERS, REFITS[how])
    whole, halved = make_driver("whole", settings), make_driver("halved", settings)
    assert whole.run() == 0, whole.errors
    assert_sound(whole)

    halved.start()
    halved.wait_for(checkpoint_committed(2))
    halved.kill("flow")
    assert halved.orphans() == []
    assert halved.run() == 0, halved.errors
    assert attempts(halved.store) == 2
    assert_sound(halved)

    tensors = checkpoint_tensors(halved.store)
    assert_same_bits(tensors, checkpoint_tensors(whole.store))
    assert all(".lora_" in name for name in tensors), "a checkpoint holds what is trained and nothing else"
    made = refits(whole)
    assert len(made) == whole.config.grpo.max_num_steps + 1
    assert all(0 <= difference <= 1e-4 for refit in made for difference in refit["canary"].values())
    paused = ["pause" in refit["seconds"] for refit in made]
    assert paused == ([True, False, False, False, False] if how == "adapters" else [True] * 5)
