"""Engines are started together or not at all, believed only in words they mean, and ended by one deadline."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows import engines as module
from flows.control import LocalControl, Signals
from flows.engines import Engines, PoolFailed, Slot, carried_stamp, responds
from flows.supervise import Child
from grpo_core.config import LocalPool, RunConfig
from grpo_core.rollout.launch import EngineCommand
from grpo_core.rollout.pool import Pool
from storage.pool import RefitRecord

HOST = "127.0.0.1"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(300)"
)


@pytest.fixture(autouse=True)
def _stubborn_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(*_: object) -> EngineCommand:
        return EngineCommand((sys.executable, "-c", STUBBORN), os.environ)

    monkeypatch.setattr(module, "engine_command", command)


def engines(tmp_path: Path, router: Pool | None = None, **pool: object) -> Engines:
    config = RunConfig(pool=LocalPool.model_validate(pool))
    control = LocalControl(Signals(), show=lambda progress: None, say=lambda message: None)
    return Engines(config, tmp_path, tmp_path, router or Pool(), control)


def children(of: Engines) -> list[Child]:
    return [slot.child for slot in of._slots if slot.child is not None]


def all_ready(of: Engines) -> None:
    deadline = time.monotonic() + 20
    while not all("ready" in child.tail() for child in children(of)):
        assert time.monotonic() < deadline, "the processes did not start"
        time.sleep(0.02)


def test_engines_started_before_one_that_cannot_be_are_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(module, "port_is_free", lambda host, port: port != 30001)
    pool = engines(tmp_path, engines=2, port=30000)
    with pytest.raises(PoolFailed, match="30001, the port is taken"):
        pool.__enter__()
    (child,) = children(pool)
    assert child.poll() is not None


def test_engines_that_ignore_sigterm_end_by_one_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines: list[float | None] = []
    stop = Child.stop
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(
        Child, "stop", lambda child, deadline=None: (deadlines.append(deadline), stop(child, deadline))[1]
    )
    with engines(tmp_path, engines=3) as pool:
        all_ready(pool)
    assert [child.poll() for child in children(pool)] == [-signal.SIGKILL] * 3
    assert len(deadlines) == 3 and len(set(deadlines)) == 1 and deadlines[0] is not None


def test_an_engine_that_cannot_be_stopped_keeps_none_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.0)
    pool = engines(tmp_path, engines=2)
    pool.start()
    stuck, other = children(pool)
    with monkeypatch.context() as patch:
        patch.setattr(other, "stop", lambda deadline: (_ for _ in ()).throw(RuntimeError("stuck")))
        with pytest.raises(RuntimeError, match="stuck"):
            pool.__exit__()
    assert stuck.poll() is not None
    other.stop()


ANSWERS = {
    "a version": (b'HTTP/1.1 200 OK\r\nContent-Length: 26\r\n\r\n{"weight_version": "3.14"}', "3.14"),
    "half a body": (b'HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"weight_version": "3', None),
    "half a status line": (b"HTT", None),
    "nothing": (b"", None),
    "no JSON": (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhm", None),
    "another object": (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", None),
    "a list": (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", None),
    "an error": (b"HTTP/1.1 500 no\r\nContent-Length: 2\r\n\r\n{}", None),
}


@pytest.fixture
def answer() -> Iterator[tuple[str, list[bytes]]]:
    """A server that sends the bytes in the list to each request, and closes the connection."""
    said: list[bytes] = [b""]
    with socket.create_server((HOST, 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(said[0])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://{HOST}:{listener.getsockname()[1]}", said
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(("sent", "stamp"), ANSWERS.values(), ids=ANSWERS)
def test_an_engine_that_dies_in_the_middle_of_an_answer_says_nothing(
    answer: tuple[str, list[bytes]], sent: bytes, stamp: str | None
) -> None:
    url, said = answer
    said[0] = sent
    assert carried_stamp(url) == stamp
    if b" 200 " not in sent:
        assert not responds(url)


def test_a_late_engine_is_asked_now_and_then_and_admitted_unless_a_refit_broke_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(module, "carried_stamp", lambda url: asked.append(url) or "1.2")
    router = Pool()
    pool = engines(tmp_path, router)
    sound, broken = Slot(0, "http://sound", "sound"), Slot(1, "http://broken", "broken", broken="the canary disagreed")
    pool._slots = [sound, broken]
    for slot in pool._slots:
        slot.ready = True
        router.join(slot.name, slot.url)
    behind, live = (RefitRecord(1, version, version, (), {}, {}) for version in (3, 2))
    for _ in range(5):
        pool._admit_late(behind)
    assert asked == ["http://sound"]
    sound.probed_at = 0.0
    pool._admit_late(live)
    assert {member.name for member in router.members() if member.admitted} == {"sound"}
