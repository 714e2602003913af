"""What must hold for every finished run, however often it was killed on the way (DESIGN §4, CONTRACTS §5)."""

from __future__ import annotations

from collections import Counter

import torch
from safetensors.torch import load_file

from grpo_core.schedule.frontier import FrontierState
from storage import layout
from storage.attempts import attempt_numbers
from storage.ledger import DROPPED, TRAINED, newest_footer, read_ledger
from storage.objects import ObjectStore
from tests.scenarios.run_driver import RunDriver, newest_manifest


def assert_sound(driver: RunDriver) -> None:
    """The run reached its end; every ordinal below its frontier was trained or dropped exactly once, none too stale."""
    store, grpo = driver.store, driver.recipe["grpo"]
    steps, prompts = grpo["max_num_steps"], grpo["num_prompts_per_step"]
    window = grpo.get("async_grpo", {}).get("max_trajectory_age_steps", 2)
    manifest = newest_manifest(store)
    assert manifest.step == steps, f"the newest checkpoint is that of step {manifest.step}"

    rows = read_ledger(store).to_pylist()
    trained = [row for row in rows if row["state"] == TRAINED]
    assert Counter(row["step"] for row in trained) == dict.fromkeys(range(1, steps + 1), prompts)
    assert all(row["lag_max"] is not None and row["lag_max"] <= window for row in trained)

    ends = Counter(row["ordinal"] for row in rows if row["state"] in (TRAINED, DROPPED))
    frontier = FrontierState.from_json(manifest.frontier)
    above = {*frontier.trained_above_cut, *frontier.dropped_above_cut}
    assert ends == dict.fromkeys([*range(frontier.cut), *sorted(above)], 1)

    footer = newest_footer(store)
    assert footer is not None
    assert footer.totals.trained == steps * prompts, "the cumulative totals do not follow the living history"


def attempts(store: ObjectStore) -> int:
    return len(attempt_numbers(store))


def checkpoint_tensors(store: ObjectStore) -> dict[str, torch.Tensor]:
    """Every tensor of the newest checkpoint: the model and the optimizer's moments."""
    manifest = newest_manifest(store)
    directory = store.local_path(layout.checkpoint(manifest.attempt, manifest.step))
    assert directory is not None
    tensors: dict[str, torch.Tensor] = {}
    for file in directory.rglob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def assert_same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    different = [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]
    assert not different, f"{len(different)} of {len(ours)} tensors differ, the first is {different[0]}"
