"""A store that is full, fails or loses an answer:
the run says so in a sentence or goes on, and ends as if nothing was."""

from __future__ import annotations

import torch

from tests.scenarios.run_driver import RunDriver
from tests.scenarios.soundness import assert_same_bits, assert_sound, attempts, checkpoint_tensors
from tests.scenarios.store_faults import Fault, Part


def test_full_disk_ends_the_run_in_a_sentence_until_there_is_space_again(
    synchronous: RunDriver, expected: dict[str, torch.Tensor]
) -> None:
    places: list[tuple[Part, str]] = [
        ("flow", "create trajectories/"),
        ("trainer rank", "create ledger/"),
        ("trainer rank", "open checkpoints/"),
    ]
    for part, write in places:
        synchronous.arm(Fault(part, write, "before", "full", lasting=True))
        assert synchronous.run() == 1, synchronous.errors
        assert "No space left" in synchronous.errors
        assert "Traceback" not in synchronous.errors
        assert synchronous.orphans() == []
    synchronous.arm()
    assert synchronous.run() == 0, synchronous.errors
    assert_sound(synchronous)
    assert_same_bits(checkpoint_tensors(synchronous.store), expected)


def test_part_that_could_not_be_written_costs_its_lease_alone(
    synchronous: RunDriver, expected: dict[str, torch.Tensor]
) -> None:
    # The answer of the last one is lost: its group is there, and is neither made nor trained a second time.
    synchronous.arm(
        Fault("flow", "create trajectories/", "before", "fail", occurrence=2),
        Fault("flow", "create trajectories/", "after", "fail", occurrence=6),
    )
    assert synchronous.run() == 0, synchronous.errors
    assert synchronous.armed() == []
    assert synchronous.errors.count("are leased again") == 2
    assert attempts(synchronous.store) == 1
    assert_sound(synchronous)
    assert_same_bits(checkpoint_tensors(synchronous.store), expected)


def test_ledger_of_the_step_before_a_checkpoint_fails(
    synchronous: RunDriver, expected: dict[str, torch.Tensor]
) -> None:
    synchronous.arm(Fault("trainer rank", r"create ledger/000001/.*step-000000002\.parquet", "before", "fail"))
    assert synchronous.run() == 0, synchronous.errors
    assert synchronous.armed() == []
    assert attempts(synchronous.store) == 2
    assert_sound(synchronous)
    assert_same_bits(checkpoint_tensors(synchronous.store), expected)
