import errno
import hashlib
import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from storage import local, objects
from storage.errors import InvalidKey, ObjectMissing, StoreFull, StoreRefused, StoreUnavailable
from storage.objects import ObjectStore
from storage.remote import Conflict, FsspecObjects


class HeedlessFileSystem(MemoryFileSystem):
    """Accepts the condition of an exclusive create and ignores it, as several S3 servers do."""

    protocol = "heedless"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        super().pipe_file(path, value, mode="overwrite")


def test_only_the_first_create_of_a_key_wins(store: ObjectStore) -> None:
    assert store.put_if_absent("a/b", b"first")
    assert not store.put_if_absent("a/b", b"second")
    assert store.get("a/b") == b"first"


def test_put_overwrites_a_hint(store: ObjectStore) -> None:
    store.put("hint", b"long old value")
    store.put("hint", b"new")
    assert store.get("hint") == b"new"


def test_missing_objects_have_their_own_error(store: ObjectStore) -> None:
    assert not store.exists("a/none")
    for read in (store.get, store.size, store.digest, lambda key: store.get_tail(key, 4)):
        with pytest.raises(ObjectMissing, match="a/none"):
            read("a/none")


def test_listing_shows_exactly_what_begins_with_the_prefix(store: ObjectStore) -> None:
    for key in ("x/lease-1", "x/lease-12", "x/other", "x/deep/lease-1", "xy/lease-1", "top"):
        store.put(key, b"1")
    assert store.list("x/") == ["x/lease-1", "x/lease-12", "x/other"]
    assert store.list("x/lease-1") == ["x/lease-1", "x/lease-12"]
    assert store.list("x/", recursive=True) == ["x/deep/lease-1", "x/lease-1", "x/lease-12", "x/other"]
    assert store.list("", recursive=True) == sorted(
        ["top", "x/deep/lease-1", "x/lease-1", "x/lease-12", "x/other", "xy/lease-1"]
    )
    assert store.list("") == ["top"]
    assert store.list("missing/") == []
    assert store.directories("") == ["x/", "xy/"]
    assert store.directories("x/") == ["x/deep/"]
    assert store.directories("missing/") == []


def test_another_client_sees_a_new_object_at_once(store: ObjectStore, s3_options: dict[str, Any]) -> None:
    other = ObjectStore.open(store.url, s3_options if store.url.startswith("s3") else None)
    assert other.list("a/") == []
    store.put_if_absent("a/b", b"1")
    assert other.list("a/") == ["a/b"]
    assert other.get("a/b") == b"1"


def test_deleting_is_idempotent_and_bounded(store: ObjectStore) -> None:
    for key in ("a/b", "a/c/d", "ab/e"):
        store.put(key, b"1")
    for _ in range(2):
        store.delete_prefix("a/")
        store.delete("ab/none")
    assert store.list("", recursive=True) == ["ab/e"]
    with pytest.raises(InvalidKey):
        store.delete_prefix("")


def test_tail_size_and_digest_of_an_object(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "DIGEST_BYTES", 3)
    store.put("a", b"0123456789")
    assert store.get_tail("a", 4) == b"6789"
    assert store.get_tail("a", 100) == b"0123456789"
    assert store.digest("a") == (10, hashlib.sha256(b"0123456789").hexdigest())


def test_directories_go_up_and_come_down_unchanged(store: ObjectStore, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "deep").mkdir(parents=True)
    (source / ".metadata").write_bytes(b"m")
    (source / "deep" / "__0_0.distcp").write_bytes(os.urandom(70_000))
    assert store.upload(source, "c/") == ["c/.metadata", "c/deep/__0_0.distcp"]
    store.download("c/", target)
    for name in (".metadata", "deep/__0_0.distcp"):
        assert (target / name).read_bytes() == (source / name).read_bytes()


def test_only_a_local_store_has_local_paths(store: ObjectStore) -> None:
    store.put("a/b", b"1")
    path = store.local_path("a/b")
    assert path is None if "://" in store.url else path is not None and path.read_bytes() == b"1"


@pytest.mark.parametrize(
    "key",
    ["", "/etc/passwd", "../x", "a/../../x", "a/./b", "a//b", "a/", "a\\b", "a\0b", "a b", ".incoming/x", "x" * 901],
)
def test_hostile_keys_never_reach_the_store(local_store: ObjectStore, key: str) -> None:
    for call in (local_store.get, local_store.exists, local_store.delete, lambda key: local_store.put(key, b"")):
        with pytest.raises(InvalidKey):
            call(key)


@pytest.mark.parametrize("prefix", ["/", "../", "a/../", "a//"])
def test_hostile_prefixes_never_reach_the_store(local_store: ObjectStore, prefix: str) -> None:
    for call in (local_store.list, local_store.directories, local_store.delete_prefix):
        with pytest.raises(InvalidKey):
            call(prefix)


def test_a_store_that_ignores_the_condition_is_refused() -> None:
    fsspec.register_implementation("heedless", HeedlessFileSystem, clobber=True)
    with pytest.raises(StoreRefused, match="If-None-Match"):
        ObjectStore.open("heedless://run")


@pytest.mark.parametrize("client", ["fsspec", "obstore"])
def test_a_missing_bucket_is_refused_in_one_sentence(s3_options: dict[str, Any], client: objects.Client) -> None:
    with pytest.raises(StoreRefused, match="no-such-bucket"):
        ObjectStore.open("s3://no-such-bucket/run", s3_options, client=client)


def test_an_unknown_kind_of_url_is_refused() -> None:
    with pytest.raises(StoreRefused, match="nope"):
        ObjectStore.open("nope://x")


def test_opening_read_only_writes_nothing(tmp_path: Path) -> None:
    store = ObjectStore.open(str(tmp_path / "run"), read_only=True)
    assert store.list("", recursive=True) == []
    assert not (tmp_path / "run").exists()


def _race(url: str, options: dict[str, Any], process: int, keys: int, start: Any, results: Any) -> None:
    store = ObjectStore.open(url, options)
    start.wait(timeout=60)
    won, torn = [], 0
    for number in range(keys):
        data = f"{process:04d}".encode() * 4096
        if store.put_if_absent(f"race/{number}", data):
            won.append(number)
        seen = store.get(f"race/{number}")
        torn += len(seen) != len(data) or seen != seen[:4] * 4096
    results.put((process, won, torn))


def _run_race(url: str, options: dict[str, Any], processes: int, keys: int) -> tuple[dict[int, int], int]:
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(processes), context.Queue()
    racers = [context.Process(target=_race, args=(url, options, n, keys, start, results)) for n in range(processes)]
    for racer in racers:
        racer.start()
    outcomes = [results.get(timeout=60) for _ in racers]
    for racer in racers:
        racer.join(timeout=60)
    winners: dict[int, int] = {}
    for process, won, _ in outcomes:
        for number in won:
            assert number not in winners, f"two winners of key {number}"
            winners[number] = process
    return winners, sum(torn for _, _, torn in outcomes)


def test_each_key_of_a_race_between_processes_has_one_winner_and_no_torn_read(tmp_path: Path) -> None:
    winners, torn = _run_race(str(tmp_path), {}, processes=8, keys=50)
    assert len(winners) == 50
    assert torn == 0
    store = ObjectStore.open(str(tmp_path))
    for number, process in winners.items():
        assert store.get(f"race/{number}")[:4] == f"{process:04d}".encode()
    assert list((tmp_path / local.INCOMING).iterdir()) == []


def test_each_key_of_a_race_on_s3_has_one_winner(
    open_store: Callable[[str], ObjectStore], s3_options: dict[str, Any]
) -> None:
    winners, torn = _run_race(open_store("s3").url, s3_options, processes=3, keys=8)
    assert len(winners) == 8
    assert torn == 0


def test_each_key_of_a_race_between_threads_has_one_winner(store: ObjectStore) -> None:
    wins: list[int] = []

    def race(me: int) -> None:
        wins.extend(key for key in range(8) if store.put_if_absent(f"t/{key}", b"%d" % me))

    threads = [threading.Thread(target=race, args=(me,)) for me in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(wins) == list(range(8))


def _write_for_ever(url: str) -> None:
    store = ObjectStore.open(url)
    for number in itertools.count():
        store.put_if_absent(f"k/{number}", b"%08d" % number * 50_000)


def test_a_killed_writer_leaves_only_whole_objects(tmp_path: Path) -> None:
    store = ObjectStore.open(str(tmp_path))
    for _ in range(5):
        store.delete_prefix("k/")
        writer = multiprocessing.get_context("fork").Process(target=_write_for_ever, args=(str(tmp_path),))
        writer.start()
        deadline = time.monotonic() + 30
        while len(store.list("k/")) < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        writer.kill()
        writer.join(timeout=30)
        keys = store.list("k/")
        assert len(keys) >= 3
        for key in keys:
            assert store.get(key) == b"%08d" % int(key[2:]) * 50_000


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_a_forked_child_can_use_the_store(open_store: Callable[[str], ObjectStore], kind: str) -> None:
    store = open_store(kind)
    child = multiprocessing.get_context("fork").Process(target=store.put, args=("from/child", b"1"))
    child.start()
    child.join(timeout=30)
    assert child.exitcode == 0
    assert store.get("from/child") == b"1"


def test_obstore_refuses_a_forked_child(
    open_store: Callable[[str], ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store("s3-obstore")
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(StoreRefused, match="spawn"):
        store.get("a")


def test_a_full_disk_is_a_typed_error_and_leaves_nothing(
    local_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_store.put("kept", b"old")

    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        for write in (local_store.put_if_absent, local_store.put):
            with pytest.raises(StoreFull, match="free some space"):
                write("a", b"data")
        with pytest.raises(StoreFull):
            local_store.put("kept", b"new")
    assert local_store.list("", recursive=True) == ["kept"]
    assert local_store.get("kept") == b"old"
    root = local_store.local_path("")
    assert root is not None and list((root / local.INCOMING).iterdir()) == []


def test_temporary_files_of_a_killed_process_are_removed_when_old(tmp_path: Path) -> None:
    ObjectStore.open(str(tmp_path))
    old, young = tmp_path / local.INCOMING / "old", tmp_path / local.INCOMING / "young"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    store = ObjectStore.open(str(tmp_path))
    assert not old.exists() and young.exists()
    assert store.list("", recursive=True) == []


class Unreliable:
    """Objects whose `create` fails as told, one entry per call, after or before doing its work."""

    remote = True

    def __init__(self, failures: list[str]) -> None:
        self.failures = failures
        self.content: dict[str, bytes] = {}

    def create(self, key: str, data: bytes) -> bool:
        failure = self.failures.pop(0) if self.failures else ""
        if failure == "refused":
            raise ConnectionResetError("connection reset")
        if failure == "conflict":
            raise Conflict("409")
        if key in self.content:
            return False
        self.content[key] = data
        if failure == "answer lost":
            raise TimeoutError("no answer")
        return True

    def prepare(self) -> None:
        pass

    def get(self, key: str) -> bytes:
        return self.content[key]

    def delete(self, key: str) -> None:
        del self.content[key]


def _unreliable(failures: list[str]) -> ObjectStore:
    fake = Unreliable(failures)
    return ObjectStore("fake://run", lambda: fake)  # type: ignore[arg-type, return-value]


def test_a_lost_answer_of_a_put_is_recognised() -> None:
    store = _unreliable(["answer lost"])
    assert store.commit("a", b"mine")
    assert store.get("a") == b"mine"


def test_a_lost_answer_while_opening_does_not_refuse_the_store() -> None:
    _unreliable(["answer lost"])._prove_exclusive_create()


def test_a_lost_race_is_not_taken_for_a_lost_answer() -> None:
    store = _unreliable([])
    store.put_if_absent("a", b"theirs")
    assert not store.commit("a", b"mine")


def test_a_broken_connection_and_an_undecided_condition_are_tried_again() -> None:
    assert _unreliable(["refused", "conflict"]).put_if_absent("a", b"mine")


def test_retries_end_in_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "TRIES", 3)
    store = _unreliable(["refused"] * 10)
    with pytest.raises(StoreUnavailable, match="connection reset"):
        store.put_if_absent("a", b"mine")


class AnsweringFileSystem(MemoryFileSystem):
    """Answers an exclusive create with an error code of the service, as s3fs passes it on for servers it half knows."""

    protocol = "answering"
    code = ""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        cause = Exception()
        cause.response = {"Error": {"Code": self.code}}  # type: ignore[attr-defined]
        raise OSError(errno.EINVAL, "At least one of the pre-conditions did not hold") from cause


@pytest.mark.parametrize("code", ["PreconditionFailed", "ConditionalRequestConflict", "SlowDown"])
def test_only_a_failed_condition_means_that_the_object_exists(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("answering", AnsweringFileSystem, clobber=True)
    monkeypatch.setattr(AnsweringFileSystem, "code", code)
    remote = FsspecObjects("answering://run", {})
    if code == "PreconditionFailed":
        assert not remote.create("a", b"1")
    else:
        with pytest.raises(OSError) as caught:
            remote.create("a", b"1")
        assert isinstance(caught.value, Conflict) == (code == "ConditionalRequestConflict")
        assert objects.is_transient(caught.value)
