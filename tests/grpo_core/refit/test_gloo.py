"""The gloo link moves bytes exactly, and its failures are known without its deadline."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from grpo_core.refit.control import ControlError
from grpo_core.refit.gloo import JOINED, READY, GlooTransfer, join_group
from grpo_core.refit.transfer import TransferError, Weights, local_address

DEADLINE = 30.0
WEIGHTS = Weights.of(
    [
        ("a", torch.randn(300, 70)),
        ("b", torch.randn(5, 5, dtype=torch.float32).to(torch.bfloat16)),
        ("c", torch.tensor(3.5)),
        ("d", torch.randn(6, 4).T),
        ("lm_head.weight", torch.randn(4, 2)),
    ],
    digests=True,
)


# How gloo and we say that time was up.
AT_DEADLINE = re.compile(r"(?i)timed? ?out|in time|within")


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """What comes only when the test is over."""
    event = threading.Event()
    yield event
    event.set()


class Worker:
    """One rank of an engine, joined in a thread."""

    def __init__(self, info: dict[str, Any], rank: int) -> None:
        self.rank = rank
        self.store = TCPStore(info["host"], info["port"], is_master=False, timeout=timedelta(seconds=DEADLINE))
        self.store.set(f"{JOINED}/{rank}", "1")
        group = PrefixStore("group", self.store)
        self.group: ProcessGroupGloo | None = join_group(
            group, rank, info["world_size"], info["host"], timedelta(seconds=DEADLINE)
        )
        self.received: dict[str, torch.Tensor] = {}

    def receive(self, update: dict[str, Any], count: int | None = None) -> None:
        self.store.set(f"{READY}/{update['number']}/{self.rank}", "1")
        for entry in update["manifest"][:count]:
            tensor = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
            assert self.group is not None
            self.group.broadcast(tensor.reshape(-1).view(torch.uint8), 0, timedelta(seconds=DEADLINE)).wait()
            self.received[entry["name"]] = tensor


class Engine:
    """What the transfer sees of an engine: its control calls, played by in-process workers."""

    name = "e0"
    url = "http://127.0.0.1:1"

    def __init__(self, workers: int = 1, update: Callable[[Engine, dict[str, Any]], None] | None = None) -> None:
        self.size = workers
        self.workers: list[Worker] = []
        self.healthy = True
        self._update = update or Engine.all_receive

    def world_size(self, deadline_seconds: float) -> int:
        return self.size

    def init_transfer(self, info: dict[str, Any], deadline_seconds: float) -> None:
        def join(rank: int) -> None:
            self.workers.append(Worker(info, rank))

        run_all([lambda rank=rank: join(rank) for rank in range(1, self.size + 1)])

    def update(self, info: dict[str, Any], deadline_seconds: float) -> None:
        self._update(self, info)

    def all_receive(self, info: dict[str, Any]) -> None:
        run_all([lambda worker=worker: worker.receive(info) for worker in self.workers])

    def is_healthy(self) -> bool:
        return self.healthy


def run_all(calls: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)


def opened(engine: Any) -> GlooTransfer:
    transfer = GlooTransfer()
    transfer.open(engine, DEADLINE)
    return transfer


@pytest.mark.parametrize("workers", [1, 2])
def test_every_worker_receives_every_tensor_bit_for_bit_in_every_update(workers: int) -> None:
    engine: Any = Engine(workers)
    transfer = opened(engine)
    assert transfer.is_open("e0")
    for _ in range(2):
        for worker in engine.workers:
            worker.received = {}
        transfer.send(engine, WEIGHTS, DEADLINE)
        for worker in engine.workers:
            assert all(torch.equal(worker.received[name], tensor) for name, tensor in WEIGHTS.tensors)
            assert all(worker.received[name].dtype == tensor.dtype for name, tensor in WEIGHTS.tensors)


def test_update_that_the_engine_rejects_is_the_engines_own_error() -> None:
    def reject(engine: Engine, info: dict[str, Any]) -> None:
        raise ControlError("tensor k_proj is missing")

    engine: Any = Engine(update=reject)
    with pytest.raises(ControlError, match="k_proj"):
        opened(engine).send(engine, WEIGHTS, DEADLINE)


def test_worker_that_is_lost_between_two_tensors_is_an_error_before_the_engine_answers(never: threading.Event) -> None:
    def leave(engine: Engine, info: dict[str, Any]) -> None:
        engine.workers[0].receive(info, count=1)
        engine.workers[0].group = None
        engine.healthy = False
        never.wait()

    engine: Any = Engine(update=leave)
    with pytest.raises(TransferError, match="e0") as caught:
        opened(engine).send(engine, WEIGHTS, DEADLINE)
    assert not AT_DEADLINE.search(str(caught.value))


def test_engine_that_dies_while_loading_is_noticed_by_its_health(never: threading.Event) -> None:
    def die(engine: Engine, info: dict[str, Any]) -> None:
        engine.all_receive(info)
        engine.healthy = False
        never.wait()

    engine: Any = Engine(update=die)
    with pytest.raises(TransferError, match="e0 died"):
        opened(engine).send(engine, WEIGHTS, DEADLINE)


def test_worker_that_never_accepts_ends_at_the_deadline(never: threading.Event) -> None:
    engine: Any = Engine(update=lambda engine, info: never.wait())
    with pytest.raises(TransferError, match="e0 did not report"):
        opened(engine).send(engine, WEIGHTS, 0.3)


def test_engine_that_refuses_to_join_is_an_error_and_no_link_remains() -> None:
    class Refusing(Engine):
        def init_transfer(self, info: dict[str, Any], deadline_seconds: float) -> None:
            raise ControlError("weight transfer is not configured")

    engine: Any = Refusing()
    transfer = GlooTransfer()
    with pytest.raises(ControlError, match="not configured"):
        transfer.open(engine, DEADLINE)
    assert not transfer.is_open("e0")


def test_worker_that_is_lost_before_the_group_forms_is_an_error_at_the_deadline(never: threading.Event) -> None:
    class Half(Engine):
        def init_transfer(self, info: dict[str, Any], deadline_seconds: float) -> None:
            store = TCPStore(info["host"], info["port"], is_master=False, timeout=timedelta(seconds=DEADLINE))
            store.set(f"{JOINED}/1", "1")
            never.wait()

    engine: Any = Half()
    transfer = GlooTransfer()
    with pytest.raises(TransferError, match="e0 and the trainer"):
        transfer.open(engine, 1.0)
    assert not transfer.is_open("e0")


@pytest.mark.parametrize("host", ["127.0.0.2", "127.0.0.3"])
def test_engine_hears_the_address_that_leads_to_it(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """As on a machine where each engine is behind another interface."""
    heard: list[str] = []

    class Listening(Engine):
        def init_transfer(self, info: dict[str, Any], deadline_seconds: float) -> None:
            heard.append(info["host"])
            super().init_transfer(info, deadline_seconds)

    engine: Any = Listening()
    engine.url = f"http://{host}:1"
    monkeypatch.setattr("grpo_core.refit.transfer.local_address", lambda asked: asked)
    opened(engine)
    assert heard == [host]


def test_loopback_is_reached_from_loopback() -> None:
    assert local_address("localhost") in ("127.0.0.1", "::1")


@pytest.mark.parametrize(("url", "reason"), [("no-url", "no host"), ("http://no.such.host.invalid", "no network")])
def test_engine_without_a_usable_host_is_an_error_of_that_engine(url: str, reason: str) -> None:
    engine: Any = Engine()
    engine.url = url
    with pytest.raises(TransferError, match=reason):
        GlooTransfer().open(engine, DEADLINE)


def test_closed_link_is_forgotten() -> None:
    engine: Any = Engine()
    transfer = opened(engine)
    transfer.close("e0")
    assert not transfer.is_open("e0")
    transfer.close("never opened")
