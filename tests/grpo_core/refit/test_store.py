"""The trainer publishes a version once for all engines, and pauses none before it has fetched it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_core.config import RunConfig
from grpo_core.refit.backends import adapter_directory, store_address, transfer_of
from grpo_core.refit.control import EngineAddress, EngineControl
from grpo_core.refit.coordinator import RefitFailed, RefitResult, refit_weights
from grpo_core.refit.gloo import GlooTransfer
from grpo_core.refit.ipc import IpcTransfer
from grpo_core.refit.nccl import NcclTransfer
from grpo_core.refit.store import StoreAddress, StoreTransfer
from grpo_core.refit.transfer import TransferError, Weights
from grpo_core.trajectory import Stamp
from storage import layout, weights
from storage.errors import Fenced
from storage.objects import ObjectStore
from tests.fake_engine import FakeEngine, Fault
from tests.grpo_core.refit.real import SETTINGS

ADDRESS = StoreAddress("file:///run", {"anon": True}, "fsspec", "/shelf")


def tensors(seed: int, rows: int = 4) -> list[tuple[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(rows, 3, generator=draw)) for name in ("model.embed_tokens.weight", "lm_head.weight")]


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore.open(str(tmp_path / "run"))


@pytest.fixture
def pool() -> Iterator[list[FakeEngine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(FakeEngine(workers=2)) for _ in range(2)]


def transfer_to(store: ObjectStore, full_every: int = 3) -> StoreTransfer:
    return StoreTransfer(store, ADDRESS, full_every=full_every, fence=lambda: None)


def publish(transfer: StoreTransfer, version: int, *, attempt: int = 1, rows: int = 4) -> int:
    return transfer.prepare(Weights.of(tensors(version, rows), digests=False), Stamp(attempt, version))


def refit(pool: list[FakeEngine], transfer: StoreTransfer, stamp: Stamp, /, **staged: Any) -> RefitResult:
    answer = {"stamp": str(stamp), "done": True, "error": None, **staged}
    for engine in pool:
        engine.staged = answer
    addresses = [EngineAddress(f"e{number}", engine.url) for number, engine in enumerate(pool)]
    settings = replace(SETTINGS, connect_seconds=2)
    return refit_weights(tensors(stamp.version), addresses, stamp, transfer, settings, canary=None)


def test_one_version_in_so_many_is_full(store: ObjectStore) -> None:
    transfer = transfer_to(store, full_every=3)
    sizes = {version: publish(transfer, version) for version in range(4)}
    assert [weights.describe(store, 1, version).base for version in range(4)] == [None, 0, 1, None]
    assert sizes[3] == weights.describe(store, 1, 3).bytes > 0


def test_every_version_is_full_when_asked(store: ObjectStore) -> None:
    transfer = transfer_to(store, full_every=1)
    for version in range(3):
        publish(transfer, version)
    assert weights.published(store, 1) == [1, 2]
    assert weights.describe(store, 1, 2).base is None


def test_versions_that_nothing_rests_on_are_deleted(store: ObjectStore) -> None:
    transfer = transfer_to(store, full_every=3)
    kept = []
    for version in range(7):
        publish(transfer, version)
        kept.append(weights.published(store, 1))
    assert kept == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [3, 4], [3, 4, 5], [3, 4, 5, 6]]


def test_a_new_attempt_begins_with_a_full_version_and_deletes_those_before(store: ObjectStore) -> None:
    publish(transfer_to(store), 0)
    transfer = transfer_to(store)
    publish(transfer, 5, attempt=2)
    assert weights.published(store, 1) == []
    assert weights.describe(store, 2, 5).base is None


def test_weights_of_another_shape_are_published_in_full(store: ObjectStore) -> None:
    transfer = transfer_to(store)
    publish(transfer, 0)
    publish(transfer, 1, rows=5)
    assert weights.describe(store, 1, 1).base is None


def test_the_next_step_does_not_change_what_was_published(store: ObjectStore, tmp_path: Path) -> None:
    """Gathered tensors may be the parameters themselves."""
    transfer, parameters = transfer_to(store), tensors(0)
    transfer.prepare(Weights.of(parameters, digests=False), Stamp(1, 0))
    for _, tensor in parameters:
        tensor.add_(1)
    transfer.prepare(Weights.of(parameters, digests=False), Stamp(1, 1))
    assert store.size(layout.weights(1, 1) + "delta.safetensors") > 100


def test_engines_fetch_before_they_are_paused(pool: list[FakeEngine], store: ObjectStore) -> None:
    result = refit(pool, transfer_to(store), Stamp(1, 0))
    assert result.refitted == ("e0", "e1")
    assert result.bytes == weights.describe(store, 1, 0).bytes
    assert list(result.seconds)[:2] == ["prepare", "connect"]
    for engine in pool:
        assert engine.calls[:4] == [
            "/init_weight_transfer_engine",
            "/collective_rpc",
            "/pause",
            "/start_weight_update",
        ]
        bodies = dict(engine.bodies)
        assert bodies["/init_weight_transfer_engine"]["init_info"]["stamp"] == "1.0"
        assert bodies["/init_weight_transfer_engine"]["init_info"]["options"] == {"anon": True}
        assert bodies["/update_weights"] == {"update_info": {"stamp": "1.0"}}
        assert engine.version == "1.0"


def test_an_engine_that_joins_late_gets_the_version_that_is_there(pool: list[FakeEngine], store: ObjectStore) -> None:
    transfer = transfer_to(store)
    refit(pool[:1], transfer, Stamp(1, 0))
    record = store.get(layout.weights_digests(1, 0))
    assert refit(pool, transfer, Stamp(1, 0)).refitted == ("e0", "e1")
    assert store.get(layout.weights_digests(1, 0)) == record
    assert pool[0].calls.count("/init_weight_transfer_engine") == 1
    refit(pool, transfer, Stamp(1, 1))
    assert pool[0].calls.count("/init_weight_transfer_engine") == 2


@pytest.mark.parametrize(
    ("staged", "said"),
    [
        ({"error": "DamagedCheckpoint: altered"}, "cannot fetch 1.0: DamagedCheckpoint: altered"),
        ({"stamp": "1.7"}, "instead of 1.0"),
        ({"done": False}, "did not fetch 1.0 from the store within 2 s"),
    ],
)
def test_engines_that_cannot_fetch_are_never_paused(
    pool: list[FakeEngine], store: ObjectStore, staged: dict[str, Any], said: str
) -> None:
    with pytest.raises(RefitFailed, match="phase connect") as caught:
        refit(pool, transfer_to(store), Stamp(1, 0), **staged)
    assert said in caught.value.broken[0].cause
    assert all("/pause" not in engine.calls for engine in pool)


@pytest.mark.parametrize("answer", [None, "1.0", {"stamp": "1.0"}, {"stamp": "1.0", "done": "true"}, {"done": True}])
def test_a_worker_that_does_not_say_it_is_done_is_not_believed(store: ObjectStore, answer: Any) -> None:
    with FakeEngine(workers=1) as engine:
        engine.staged = answer
        transfer = transfer_to(store)
        publish(transfer, 0)
        with pytest.raises(TransferError, match=r"instead of 1\.0|did not fetch 1\.0"):
            transfer.open(EngineControl(EngineAddress("e0", engine.url)), 0.3)


def test_an_engine_without_our_extension_is_named(store: ObjectStore) -> None:
    with FakeEngine() as engine:
        engine.faults.append(Fault("/collective_rpc", "status", status=500))
        transfer = transfer_to(store)
        publish(transfer, 0)
        with pytest.raises(Exception, match="engine e0: POST /collective_rpc answered 500"):
            transfer.open(EngineControl(EngineAddress("e0", engine.url)), 5)
        engine.staged = {}
        with pytest.raises(TransferError, match="has a worker that fetches {}"):
            transfer.open(EngineControl(EngineAddress("e0", engine.url)), 5)


def test_a_fenced_trainer_touches_no_engine(pool: list[FakeEngine], store: ObjectStore) -> None:
    def fence() -> None:
        raise Fenced("a newer attempt owns the run")

    with pytest.raises(Fenced):
        refit(pool, StoreTransfer(store, ADDRESS, full_every=3, fence=fence), Stamp(1, 0))
    assert all(engine.calls == [] for engine in pool)


def test_each_backend_has_its_transfer(store: ObjectStore, tmp_path: Path) -> None:
    def made(backend: str) -> object:
        device = "cuda" if backend in ("nccl", "ipc") else "cpu"
        values = {
            "refit": {"backend": backend},
            "training": {"device": device},
            "pool": {"kind": "local", "device": device},
        }
        return transfer_of(RunConfig.model_validate(values), store, fence=lambda: None)

    kinds = {"gloo": GlooTransfer, "nccl": NcclTransfer, "ipc": IpcTransfer, "store": StoreTransfer}
    assert {backend: type(made(backend)) for backend in kinds} == kinds
    address = store_address(RunConfig(run_id="r"), store)
    assert address.url == str(store.local_path(""))
    assert "weights/r-" in address.shelf


def test_a_run_has_a_directory_of_its_own_for_its_adapters(tmp_path: Path) -> None:
    here, there = (ObjectStore.open(str(tmp_path / name)) for name in ("a", "b"))
    chosen = RunConfig.model_validate(
        {"run_id": "r", "model": {"lora": {}}, "refit": {"adapter_only": True, "adapter_directory": str(tmp_path)}}
    )
    assert adapter_directory(chosen, here).parent == tmp_path
    assert adapter_directory(chosen, here) != adapter_directory(chosen, there)
    assert adapter_directory(RunConfig(run_id="r"), here).parent == Path("~/.cache/forebay/adapters").expanduser()
