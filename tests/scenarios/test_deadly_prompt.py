"""A prompt that kills the flow whenever it is generated is found and given up, and nothing else is."""

from __future__ import annotations

from storage.ledger import read_ledger
from tests.scenarios.conftest import MakeDriver
from tests.scenarios.run_driver import RunDriver
from tests.scenarios.soundness import account, attempts

DEADLY = 3


def deadly_run(driver: RunDriver) -> RunDriver:
    """The prompt of one ordinal kills; the others of the first steps are in flight with it."""
    path = driver.directory / "numbered.jsonl"
    path.write_text("".join(f'{{"prompt": "{number} + 1 ="}}\n' for number in range(20)))
    driver.recipe["data"] = {"source": {"kind": "files", "path": str(path)}, "shuffle": False}
    factory = {"factory": "scenario_environment:Deadly", "arguments": {"prompt": f"{DEADLY} + 1 ="}}
    driver.recipe["environment"] = {"kind": "python", "timeout_seconds": 20, **factory}
    driver.recipe["grpo"] |= {"num_prompts_per_step": 2, "max_num_steps": 3}
    driver.recipe["grpo"]["async_grpo"] = {"max_trajectory_age_steps": 1}
    driver.recipe["checkpointing"] = {"save_period": 1}
    return driver


def test_prompt_that_kills_the_flow_every_time_is_dropped_and_no_other(make_driver: MakeDriver) -> None:
    driver = deadly_run(make_driver())
    statuses = []
    while not statuses or statuses[-1] != 0:
        assert len(statuses) < 8, f"{statuses}: {driver.errors}"
        statuses.append(driver.run())
    assert statuses.count(-9) == len(statuses) - 1 >= 3, statuses
    assert attempts(driver.store) == len(statuses)
    ends = {row["ordinal"]: (row["state"], row["reason"]) for row in read_ledger(driver.store).to_pylist()}
    assert ends.pop(DEADLY) == ("dropped", "generation_failed")
    assert ends == dict.fromkeys([0, 1, 2, 4, 5, 6], ("trained", None))
    found = account(driver)
    assert (found.skipped, found.repeated, found.stale_tokens) == (0, 0, 0)
