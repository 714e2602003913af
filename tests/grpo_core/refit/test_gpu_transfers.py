"""NCCL and CUDA IPC links: the calls they make and in which order, against recorded doubles of vLLM's side.

The wires themselves need GPUs; what is shown here is that the coordinator's phases stay the coordinator's, that
no transfer outlives its deadline, and that what the wire cannot do is refused with a reason.
"""

from __future__ import annotations

import base64
import pickle
import threading
from typing import Any

import pytest
import torch

from grpo_core.refit.control import ControlError
from grpo_core.refit.ipc import IpcTransfer, handle_encoding
from grpo_core.refit.links import HeldWeights, PhaseClient
from grpo_core.refit.nccl import NcclTransfer
from grpo_core.refit.transfer import TransferError, Weights, local_address

WEIGHTS = Weights.of([("a", torch.ones(4, 4)), ("lm_head.weight", torch.ones(2, 2))], digests=False)


class Engine:
    """Records the control calls made to it."""

    def __init__(self, name: str = "e0", url: str = "http://127.0.0.1:8000", workers: int = 2) -> None:
        self.name, self.url, self.workers = name, url, workers
        self.calls: list[tuple[str, Any]] = []

    def world_size(self, deadline_seconds: float) -> int:
        return self.workers

    def init_transfer(self, info: dict[str, Any], deadline_seconds: float) -> None:
        self.calls.append(("init", info))

    def update(self, info: dict[str, Any], deadline_seconds: float) -> None:
        self.calls.append(("update", info))


class Link:
    """Behaves like vLLM's trainer engine: drives all phases through its client and reads the source once."""

    def __init__(self, client: PhaseClient, source: HeldWeights) -> None:
        self.client, self.source = client, source
        self.sent: list[list[str]] = []
        self.shut_down = 0
        self.hang = threading.Event()
        self.hang.set()

    def send_weights(self) -> None:
        self.client.start_weight_update()
        self.client.update_weights({"names": [name for name, _ in self.source]})
        assert self.hang.wait(30)
        self.sent.append([name for name, _ in self.source])
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        self.shut_down += 1
        self.hang.set()


class Vllm:
    """Stands for vLLM's factory: makes links and remembers how it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.links: list[Link] = []

    def __call__(self, *arguments: Any) -> Link:
        *settings, client, source = arguments
        self.asked.append(tuple(settings))
        client.init_weight_transfer_engine({"rank_offset": 1})
        self.links.append(Link(client, source))
        return self.links[-1]


def test_nccl_link_is_of_the_trainer_and_one_engines_workers() -> None:
    vllm, engine = Vllm(), Engine(url="http://127.0.0.3:8000", workers=4)
    transfer = NcclTransfer(connect=vllm)
    transfer.open(engine, 5)  # type: ignore[arg-type]
    (host, port, world_size) = vllm.asked[0]
    assert (host, world_size) == (local_address("127.0.0.3"), 5)
    assert port > 0
    assert engine.calls == [("init", {"rank_offset": 1})]
    assert transfer.is_open("e0")


TRANSFERS = pytest.mark.parametrize(
    "make", [lambda vllm: NcclTransfer(vllm), lambda vllm: IpcTransfer(1 << 20, vllm)], ids=["nccl", "ipc"]
)


@TRANSFERS
def test_start_and_finish_stay_with_the_coordinator(make: Any) -> None:
    vllm, engine = Vllm(), Engine()
    transfer = make(vllm)
    transfer.open(engine, 5)
    transfer.send(engine, WEIGHTS, 5)
    transfer.send(engine, WEIGHTS, 5)
    update = ("update", {"names": ["a", "lm_head.weight"]})
    assert engine.calls == [("init", {"rank_offset": 1}), update, update]
    assert vllm.links[0].sent == [["a", "lm_head.weight"]] * 2
    assert vllm.links[0].source.weights is None


@TRANSFERS
def test_a_transfer_that_hangs_is_given_up_at_its_deadline_and_its_link_closed(make: Any) -> None:
    vllm, engine = Vllm(), Engine()
    transfer = make(vllm)
    transfer.open(engine, 5)
    vllm.links[0].hang.clear()
    with pytest.raises(TransferError, match=r"e0 did not receive the weights within 0\.2 s"):
        transfer.send(engine, WEIGHTS, 0.2)
    assert vllm.links[0].shut_down == 1
    assert not transfer.is_open("e0")


@TRANSFERS
def test_a_link_that_is_made_after_its_deadline_is_closed_again(make: Any) -> None:
    arrived, closed = threading.Event(), threading.Event()

    class Late(Link):
        def shutdown(self) -> None:
            closed.set()

    def late(*arguments: Any) -> Link:
        assert arrived.wait(30)
        return Late(*arguments[-2:])

    transfer = make(late)
    with pytest.raises(TransferError, match=r"e0 did not connect within 0\.2 s"):
        transfer.open(Engine(), 0.2)
    assert not transfer.is_open("e0")
    arrived.set()
    assert closed.wait(30)


@TRANSFERS
@pytest.mark.parametrize("failure", [ControlError("answered 500"), TransferError("is disabled"), RuntimeError("NCCL")])
def test_a_link_that_cannot_be_made_is_the_engines_failure_and_may_be_tried_again(
    make: Any, failure: Exception
) -> None:
    vllm, attempts = Vllm(), []

    def second_time(*arguments: Any) -> Link:
        attempts.append(arguments)
        if len(attempts) == 1:
            raise failure
        return vllm(*arguments)

    transfer = make(second_time)
    with pytest.raises((ControlError, TransferError), match=str(failure)):
        transfer.open(Engine(), 5)
    assert not transfer.is_open("e0")
    transfer.open(Engine(), 5)
    assert transfer.is_open("e0")


@TRANSFERS
def test_error_of_the_engine_passes_through(make: Any) -> None:
    class Failing(Engine):
        def update(self, info: dict[str, Any], deadline_seconds: float) -> None:
            raise ControlError("engine e0: POST /update_weights answered 500")

    vllm, engine = Vllm(), Failing()
    transfer = make(vllm)
    transfer.open(engine, 5)
    with pytest.raises(ControlError, match="500"):
        transfer.send(engine, WEIGHTS, 5)
    assert not transfer.is_open("e0") and vllm.links[0].shut_down == 1


def test_error_of_the_wire_names_the_engine() -> None:
    class Broken(Link):
        def send_weights(self) -> None:
            raise RuntimeError("NCCL error: remote process exited")

    transfer = NcclTransfer(connect=lambda *arguments: Broken(*arguments[-2:]))
    transfer.open(Engine(), 5)  # type: ignore[arg-type]
    with pytest.raises(TransferError, match="e0 did not receive the weights: NCCL error"):
        transfer.send(Engine(), WEIGHTS, 5)  # type: ignore[arg-type]


def test_one_engines_link_can_be_closed_alone() -> None:
    vllm = Vllm()
    transfer = NcclTransfer(connect=vllm)
    for name in ("e0", "e1"):
        transfer.open(Engine(name), 5)  # type: ignore[arg-type]
    transfer.close("e0")
    assert [link.shut_down for link in vllm.links] == [1, 0]
    assert not transfer.is_open("e0")
    assert transfer.is_open("e1")


def test_ipc_handles_travel_in_the_encoding_of_the_http_route() -> None:
    encoded = handle_encoding()({"names": ["a"], "ipc_handles": {"GPU-1": (1, b"handle")}})
    assert encoded["names"] == ["a"]
    assert "ipc_handles" not in encoded
    assert pickle.loads(base64.b64decode(encoded["ipc_handles_pickled"])) == {"GPU-1": (1, b"handle")}


def test_ipc_refuses_an_engine_that_is_not_on_loopback() -> None:
    engine: Any = Engine(url="http://10.0.0.7:8000")
    with pytest.raises(TransferError, match=r"10\.0\.0\.7"):
        IpcTransfer(1 << 20, Vllm()).open(engine, 5)


def test_ipc_refuses_a_tensor_larger_than_its_buffer_before_anything_is_sent() -> None:
    engine: Any = Engine()
    transfer = IpcTransfer(32, Vllm())
    transfer.open(engine, 5)
    with pytest.raises(TransferError, match="tensor a of 64 bytes"):
        transfer.send(engine, WEIGHTS, 5)
    assert [name for name, _ in engine.calls] == ["init"]
