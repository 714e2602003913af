"""Engines are believed only in words they mean, and a slow one keeps nobody waiting."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from flows.probe import Look, Prober, carried_stamp, look, responds
from tests.fake_engine import FakeEngine, Fault

HOST = "127.0.0.1"

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


def test_a_look_tells_health_version_and_load() -> None:
    with FakeEngine(version="1.4") as engine:
        seen = look(engine.url)
        assert (seen.healthy, seen.stamp) == (True, "1.4")
        assert seen.load is not None and seen.load.kv_usage == 0.25
        engine.faults += [Fault("/weight_info", "status"), Fault("/metrics", "reset")]
        assert look(engine.url) == Look(True, None, None)
        engine.faults.append(Fault("/health", "status", status=503))
        assert look(engine.url) == Look(healthy=False)
    assert look(engine.url) == Look(healthy=False)


@pytest.mark.parametrize("value", ["garbage", "+Inf", "NaN", "1e999", ""])
def test_nonsense_about_its_load_is_not_heard_and_ends_no_watch(value: str) -> None:
    with FakeEngine(version="1.4") as engine:
        text = f"vllm:num_requests_running {value}\nvllm:kv_cache_usage_perc 0.5\n"
        engine.faults.append(Fault("/metrics", "garbage", text=text))
        prober = Prober()
        while (answer := prober.ask("e0", engine.url, 60.0)) is None:
            time.sleep(0.001)
        prober.close()
        assert answer.load is not None and (answer.load.running, answer.load.kv_usage) == (0.0, 0.5)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def answer_of(prober: Prober, name: str, every_seconds: float = 0.0) -> Look | None:
    """The next answer, or None when there is none within a moment."""
    for _ in range(100):
        if (answer := prober.ask(name, "url", every_seconds)) is not None:
            return answer
        time.sleep(0.001)
    return None


def test_an_engine_is_looked_at_again_only_when_it_is_time() -> None:
    clock = Clock()
    looked: list[str] = []
    prober = Prober(lambda url: looked.append(url) or Look(True), clock)
    assert answer_of(prober, "a", 2.0) == Look(True)
    assert answer_of(prober, "a", 2.0) is None
    clock.now = 2.0
    assert answer_of(prober, "a", 2.0) == Look(True)
    assert len(looked) == 2
    prober.forget("a")
    assert answer_of(prober, "a", 2.0) == Look(True)
    prober.close()


def test_an_engine_that_hangs_keeps_nobody_waiting() -> None:
    hang = threading.Event()
    looked: list[str] = []

    def slow(url: str) -> Look:
        looked.append(url)
        hang.wait(10)
        return Look(True)

    prober = Prober(slow)
    assert answer_of(prober, "a") is None
    assert len(looked) == 1
    hang.set()
    assert answer_of(prober, "a") == Look(True)
    prober.close()
