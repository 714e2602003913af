"""A window of 0 with a deterministic engine is synchronous GRPO:
the plain loop's bits, however a run came to its end."""

from __future__ import annotations

import torch

from tests.scenarios.conftest import MakeDriver
from tests.scenarios.run_driver import SYNCHRONOUS, RunDriver, checkpoint_committed, merged
from tests.scenarios.soundness import assert_same_bits, assert_sound, attempts, checkpoint_tensors

Tensors = dict[str, torch.Tensor]


def test_an_uninterrupted_run_is_the_plain_loop(synchronous: RunDriver, expected: Tensors) -> None:
    assert synchronous.run() == 0, synchronous.errors
    assert_sound(synchronous)
    assert_same_bits(checkpoint_tensors(synchronous.store), expected)


def test_half_a_run_killed_and_continued_is_the_whole(synchronous: RunDriver, expected: Tensors) -> None:
    synchronous.start()
    synchronous.wait_for(checkpoint_committed(2))
    synchronous.kill("flow")
    assert synchronous.run() == 0, synchronous.errors
    assert attempts(synchronous.store) == 2
    assert_sound(synchronous)
    assert_same_bits(checkpoint_tensors(synchronous.store), expected)


def test_half_a_run_finished_and_extended_is_the_whole(make_driver: MakeDriver, expected: Tensors) -> None:
    driver = make_driver(settings=merged(SYNCHRONOUS, {"grpo": {"max_num_steps": 2}}))
    assert driver.run() == 0, driver.errors
    driver.recipe["grpo"]["max_num_steps"] = SYNCHRONOUS["grpo"]["max_num_steps"]
    assert driver.run() == 0, driver.errors
    assert_sound(driver)
    assert_same_bits(checkpoint_tensors(driver.store), expected)
