"""What must hold for every finished run, however often it was killed on the way (DESIGN §4, CONTRACTS §5)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc
import torch
from safetensors.torch import load_file

from grpo_core.schedule.frontier import FrontierState
from storage import layout, schema
from storage.attempts import attempt_numbers, living_chain
from storage.layout import PartName
from storage.ledger import DROPPED, TRAINED, newest_footer, read_ledger
from storage.objects import ObjectStore
from storage.trajectories import TrajectoryStore
from tests.scenarios.run_driver import RunDriver, newest_manifest


@dataclass(frozen=True, slots=True)
class Account:
    """What went wrong in a run: ordinals below the end of its history that were neither trained nor dropped, ordinals
    that came to an end more than once, and tokens that were trained beyond the window or from foreign weights."""

    skipped: int = 0
    repeated: int = 0
    stale_tokens: int = 0


def account(driver: RunDriver) -> Account:
    """The living history of a run, held against its newest checkpoint and the tokens in its shards."""
    store = driver.store
    rows = read_ledger(store).to_pylist()
    ends = Counter(row["ordinal"] for row in rows if row["state"] in (TRAINED, DROPPED))
    frontier = FrontierState.from_json(newest_manifest(store).frontier)
    ended = {*range(frontier.cut), *frontier.trained_above_cut, *frontier.dropped_above_cut}
    return Account(
        skipped=len(ended - ends.keys()),
        repeated=sum(count > 1 for count in ends.values()),
        stale_tokens=sum(stale_tokens(driver, row) for row in rows if row["state"] == TRAINED),
    )


def stale_tokens(driver: RunDriver, row: dict[str, Any]) -> int:
    """Tokens that a step trained of one group beyond those that its shard shows to be of the window.

    `row` is of the ledger; the shard's own version spans are what counts.
    """
    config, store = driver.config, driver.store
    every = config.refit.every_steps
    oldest = (row["step"] - 1) // every - config.grpo.async_grpo.max_trajectory_age_steps
    newest = {link.attempt: link.last_step for link in living_chain(store)}
    part = PartName(row["lease_attempt"], row["lease"], row["part"])
    shard = TrajectoryStore(store, part.attempt).read([part], ["ordinal", "loss_mask", "version_spans"]).to_pylist()
    fresh = 0
    for sequence in shard:
        for span in sequence["version_spans"]:
            living = span["attempt"] in newest
            last_step = newest.get(span["attempt"])
            living = living and (last_step is None or span["version"] <= last_step // every)
            if sequence["ordinal"] == row["ordinal"] and living and span["version"] >= oldest:
                fresh += sum(sequence["loss_mask"][span["start"] : span["end"]])
    return max(0, row["tokens_trained"] - fresh)


def assert_sound(driver: RunDriver) -> None:
    """The run reached its end; every ordinal below its frontier was trained or dropped exactly once, none too stale."""
    store, grpo = driver.store, driver.config.grpo
    steps, prompts, window = grpo.max_num_steps, grpo.num_prompts_per_step, grpo.async_grpo.max_trajectory_age_steps
    manifest = newest_manifest(store)
    assert manifest.step == steps, f"the newest checkpoint is that of step {manifest.step}"

    rows = read_ledger(store).to_pylist()
    trained = [row for row in rows if row["state"] == TRAINED]
    assert Counter(row["step"] for row in trained) == dict.fromkeys(range(1, steps + 1), prompts)
    assert all(row["lag_max"] is not None and row["lag_max"] <= window for row in trained)
    assert account(driver) == Account()

    ends = {row["ordinal"] for row in rows if row["state"] in (TRAINED, DROPPED)}
    frontier = FrontierState.from_json(manifest.frontier)
    assert ends == {*range(frontier.cut), *frontier.trained_above_cut, *frontier.dropped_above_cut}

    footer = newest_footer(store)
    assert footer is not None
    assert footer.totals.trained == steps * prompts, "the cumulative totals do not follow the living history"


def attempts(store: ObjectStore) -> int:
    return len(attempt_numbers(store))


def engines_of(store: ObjectStore) -> set[str]:
    """The engines that made the trajectories."""
    keys = store.list(layout.trajectories_prefix(), recursive=True)
    tables = (schema.decode(store.get(key), ["engine"], name=key)[0] for key in keys)
    return {name for table in tables for name in pc.unique(table.column("engine")).to_pylist()}


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
