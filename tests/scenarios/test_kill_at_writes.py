"""Kill −9 exactly before and after a write to the store, again and again: the run comes to the undisturbed bits."""

from __future__ import annotations

import torch

from tests.scenarios.run_driver import RunDriver
from tests.scenarios.soundness import assert_same_bits, assert_sound, checkpoint_tensors
from tests.scenarios.store_faults import Fault

# In the order in which a run comes to them, for the chain would otherwise end before its last kill.
FLOW_KILLS = [
    Fault("flow", "create run.json", "before", "kill"),
    Fault("flow", r"create attempts/\d+\.json", "after", "kill"),
    Fault("flow", "create leases/", "after", "kill", occurrence=2),
    Fault("flow", "create trajectories/", "before", "kill", occurrence=3),
    Fault("flow", "create trajectories/", "after", "kill", occurrence=5),
]
TRAINER_KILLS = [
    Fault("trainer rank", "create refits/.*version-000000000", "after", "kill"),
    Fault("trainer rank", r"create ledger/.*step-000000001\.parquet", "after", "kill"),
    Fault("trainer rank", "open checkpoints/.*step-000000002", "before", "kill"),
    Fault("trainer rank", "create checkpoints/.*step-000000002/MANIFEST", "before", "kill"),
    Fault("trainer rank", "create checkpoints/.*step-000000002/MANIFEST", "after", "kill"),
    Fault("trainer rank", r"create ledger/.*step-000000004\.parquet", "before", "kill"),
]


def test_flow_killed_at_one_write_after_the_other(synchronous: RunDriver, expected: dict[str, torch.Tensor]) -> None:
    for fault in FLOW_KILLS:
        synchronous.arm(fault)
        assert synchronous.run() == -9, synchronous.errors
        assert synchronous.armed() == []
        assert synchronous.orphans() == []
    assert synchronous.run() == 0, synchronous.errors
    assert_sound(synchronous)
    assert_same_bits(checkpoint_tensors(synchronous.store), expected)
    assert synchronous.orphans() == []


def test_trainer_killed_at_one_write_after_the_other(synchronous: RunDriver, expected: dict[str, torch.Tensor]) -> None:
    # A second death within ten minutes ends the command, so each command meets two kills.
    for first, second in zip(TRAINER_KILLS[::2], TRAINER_KILLS[1::2], strict=True):
        synchronous.arm(first, second)
        assert synchronous.run() == 1
        assert "the trainer died twice" in synchronous.errors
        assert synchronous.armed() == []
        assert synchronous.orphans() == []
    assert synchronous.run() == 0, synchronous.errors
    assert_sound(synchronous)
    assert_same_bits(checkpoint_tensors(synchronous.store), expected)
