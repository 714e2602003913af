"""The same run with a real vLLM engine: killed in the middle, continued, sound, and every refit exact."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
import torch

from grpo_core.training.batch import Row
from grpo_core.training.feed import table_rows
from storage import layout
from storage.ledger import newest_footer
from storage.objects import ObjectStore
from storage.records import read_record
from storage.trajectories import TrajectoryStore
from tests import sequential
from tests.scenarios.conftest import MakeDriver
from tests.scenarios.run_driver import SYNCHRONOUS, merged, steps_done
from tests.scenarios.soundness import assert_sound, attempts, checkpoint_tensors, engines_of

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


@pytest.mark.vllm
def test_an_engine_killed_in_the_middle_of_a_refit_of_two_costs_only_itself(make_driver: MakeDriver) -> None:
    driver = make_driver(settings=merged(REAL_ENGINE, {"pool": {"engines": 2}, "evaluation": {"at_start": False}}))
    # Both engines get every tensor once when the run begins, and once more after each step.
    driver.hold_refit(5)
    driver.start()
    driver.wait_for_held_refit(seconds=600)
    victim = driver.find("engine")[0]
    for process in [*victim.children(recursive=True), victim]:
        process.kill()
    driver.release_refit()
    assert driver.finish(600) == 0, driver.errors
    assert attempts(driver.store) == 1
    assert_sound(driver)
    assert {"engine-0", "engine-1"} <= engines_of(driver.store)
    refits = [read_record(driver.store, key) for key in driver.store.list(layout.refits_prefix(1), recursive=True)]
    assert any(len(refit["canary"]) == 1 for refit in refits), "no refit went to one engine alone"
    assert all(difference <= 1e-4 for refit in refits for difference in refit["canary"].values())
    assert driver.orphans() == []


def sampled_groups(store: ObjectStore) -> tuple[list[list[Row]], list[list[float]]]:
    """The groups of attempt 1 and their rewards, by ordinal."""
    names = [name for key in store.list("trajectories/", recursive=True) if (name := layout.parse_part(key))]
    table = TrajectoryStore(store, 1).read(names).sort_by([("ordinal", "ascending"), ("rollout", "ascending")])
    members = zip(
        table.column("ordinal").to_pylist(), table_rows(table), table.column("reward").to_pylist(), strict=True
    )
    by_ordinal = [list(group) for _, group in groupby(members, key=lambda member: member[0])]
    return [[row for _, row, _ in group] for group in by_ordinal], [[r for *_, r in group] for group in by_ordinal]


@pytest.mark.vllm
def test_with_a_real_engine_the_first_step_agrees_with_the_plain_loop(make_driver: MakeDriver) -> None:
    """The plain loop learns from the tokens that the engine sampled, once with its log-probs and once with its own."""
    one_step = {"grpo": {"max_num_steps": 1}, "evaluation": {"at_start": False, "at_end": False}}
    driver = make_driver(settings=merged(merged(SYNCHRONOUS, REAL_ENGINE), one_step))
    driver.start()
    assert driver.finish(600) == 0, driver.errors
    groups, rewards = sampled_groups(driver.store)
    assert len(groups) == driver.config.grpo.num_prompts_per_step

    policy, optimizer = sequential.learner(driver.config, driver.policy())
    loss = sequential.learn(driver.config, policy, optimizer, groups, rewards)
    footer = newest_footer(driver.store)
    assert footer is not None and abs(footer.metrics["loss"] - loss) <= 1e-5
    ours, theirs = checkpoint_tensors(driver.store), sequential.checkpoint_tensors(policy, optimizer)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(ours[name].reshape(theirs[name].shape), theirs[name], atol=1e-5, rtol=0)

    # And the engine did have the plain loop's log-probs: with them in place of its own the loss is the same.
    own, optimizer = sequential.learner(driver.config, driver.policy())
    exact = [[replace(row, logprobs=logprobs_of(own, row)) for row in group] for group in groups]
    assert abs(sequential.learn(driver.config, own, optimizer, exact, rewards) - loss) <= 1e-5


def logprobs_of(policy: sequential.Policy, row: Row) -> np.ndarray:
    """The policy's own log-probs of a row's generated tokens, 0 on the others."""
    with torch.no_grad():
        batch = sequential.Batch.of([row], [0.0], oldest_version=0, device=sequential.CPU)
        scores = policy(batch.input_ids, batch.position_ids, batch.packing, at=batch.at, targets=batch.targets)
    values = np.zeros(len(row.ids), dtype=np.float32)
    values[row.generated] = scores.logprobs.numpy()
    return values
