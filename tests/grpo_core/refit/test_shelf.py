"""A host fetches each version once, as little of it as it can, and never takes another run's weights for it."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_core.refit import snapshot
from grpo_core.refit.digest import ManifestError
from grpo_core.refit.shelf import manifest_of, obtain
from grpo_core.refit.store import StoreAddress, StoreTransfer
from grpo_core.refit.transfer import TransferError, Weights
from grpo_core.trajectory import Stamp
from storage import layout, weights
from storage.errors import DamagedCheckpoint, ObjectMissing
from storage.objects import ObjectStore

ADDRESS = StoreAddress("unused", {}, "fsspec", "unused")


def policy(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    return {name: torch.randn(8, 4, generator=draw).to(torch.bfloat16) for name in names}


class Run:
    """A store to which a trainer publishes versions, and the shelf of a host."""

    def __init__(self, directory: Path) -> None:
        self.store = ObjectStore.open(str(directory / "run"))
        self.shelf = directory / "shelf"
        self.trainer(full_every=4)

    def trainer(self, full_every: int) -> None:
        self.transfer = StoreTransfer(self.store, ADDRESS, full_every=full_every, fence=lambda: None)

    def publish(self, attempt: int, version: int, seed: int | None = None) -> dict[str, torch.Tensor]:
        tensors = policy(100 * attempt + version if seed is None else seed)
        self.transfer.prepare(Weights.of(tensors.items(), digests=False), Stamp(attempt, version))
        return tensors

    def obtain(self, attempt: int, version: int) -> dict[str, torch.Tensor]:
        return snapshot.read_tensors(obtain(self.store, Stamp(attempt, version), self.shelf, deadline_seconds=1))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_every_version_is_what_the_trainer_published(run: Run) -> None:
    for version in range(6):
        assert same(run.publish(1, version), run.obtain(1, version))
    assert len(list(run.shelf.glob("*.safetensors"))) == 2
    assert len(list(run.shelf.glob("*.manifest"))) == 2


def test_only_the_difference_is_fetched_when_its_base_is_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[int] = []
    fetch = weights.fetch
    monkeypatch.setattr(
        weights,
        "fetch",
        lambda store, attempt, version, to: (fetched.append(version), fetch(store, attempt, version, to)),
    )
    run.publish(1, 0)
    run.obtain(1, 0)
    run.publish(1, 1)
    run.obtain(1, 1)
    run.obtain(1, 1)
    assert fetched == [0, 1]
    late = run.shelf.with_name("another host")
    file = obtain(run.store, Stamp(1, 1), late, deadline_seconds=1)
    assert fetched == [0, 1, 0, 1]
    assert [entry.name for entry in manifest_of(file)] == ["model.embed_tokens.weight", "lm_head.weight"]


def test_another_runs_version_of_the_same_number_is_another_file(run: Run, tmp_path: Path) -> None:
    before = run.publish(1, 0)
    assert same(run.obtain(1, 0), before)
    other = Run(tmp_path / "other")
    other.shelf = run.shelf
    assert same(other.publish(1, 0, seed=9), other.obtain(1, 0))
    assert same(run.obtain(1, 0), before)


def test_a_base_of_another_run_is_not_built_upon(run: Run, tmp_path: Path) -> None:
    run.publish(1, 0)
    run.obtain(1, 0)
    other = Run(tmp_path / "other")
    other.shelf = run.shelf
    other.publish(1, 0, seed=9)
    assert same(other.publish(1, 1), other.obtain(1, 1))


def test_what_is_damaged_in_the_store_never_reaches_the_shelf(run: Run) -> None:
    run.publish(1, 0)
    key = layout.weights(1, 0) + snapshot.FULL
    run.store.put(key, run.store.get(key)[:-1] + b"x")
    with pytest.raises(DamagedCheckpoint, match="missing or altered"):
        run.obtain(1, 0)
    assert list(run.shelf.glob("*.safetensors")) == []
    with pytest.raises(ObjectMissing):
        run.obtain(1, 7)


def test_a_difference_to_a_damaged_base_is_found_out_by_the_digests(run: Run) -> None:
    run.publish(1, 0)
    run.obtain(1, 0)
    (base,) = run.shelf.glob("*.safetensors")
    data = bytearray(base.read_bytes())
    data[-1] ^= 1
    base.write_bytes(bytes(data))
    run.publish(1, 1)
    with pytest.raises(ManifestError, match="was damaged"):
        run.obtain(1, 1)


def test_workers_of_one_host_fetch_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, fetched, results = run.publish(1, 0), list[int](), list[Any]()
    fetch = weights.fetch
    monkeypatch.setattr(
        weights,
        "fetch",
        lambda store, attempt, version, to: (fetched.append(version), fetch(store, attempt, version, to)),
    )
    workers = [threading.Thread(target=lambda: results.append(run.obtain(1, 0))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(10)
    assert fetched == [0]
    assert len(results) == 4 and all(same(result, expected) for result in results)


def test_a_shelf_that_stays_locked_is_an_error(run: Run) -> None:
    run.publish(1, 0)
    run.shelf.mkdir()
    with (run.shelf / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TransferError, match="another process has been fetching"):
            obtain(run.store, Stamp(1, 0), run.shelf, deadline_seconds=0)
