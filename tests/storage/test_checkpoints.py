from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage import checkpoints, layout, weights
from storage.attempts import Fence, claim_next
from storage.checkpoints import Manifest
from storage.digests import FileDigest, digest_directory
from storage.errors import DamagedCheckpoint, Fenced, NoValidCheckpoint, ObjectMissing, StorageError
from storage.layout import CheckpointName, PartName
from storage.objects import ObjectStore
from storage.records import encode_record

Save = Callable[..., Manifest]
OWNER: dict[str, Any] = {"host": "h", "pid": 7, "pid_started_at": 1.5, "claimed_at": 2.5}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    directory = tmp_path / "files"
    (directory / "model").mkdir(parents=True)
    (directory / ".metadata").write_bytes(b"metadata")
    (directory / "model" / "__0_0.distcp").write_bytes(bytes(range(256)) * 40)
    return directory


@pytest.fixture
def save(files: Path) -> Callable[[ObjectStore], Save]:
    def for_store(store: ObjectStore) -> Save:
        def save_step(attempt: int, step: int, **changes: Any) -> Manifest:
            store.upload(files, layout.checkpoint(attempt, step))
            store.put_if_absent(layout.part(1, 2, 3), b"a part")
            manifest = Manifest(
                attempt=attempt, step=step, version=step, files=digest_directory(files), frontier={"cut": step},
                created_at=1.5, metrics={"reward": 0.5}, extra={"scheduler": [1, 2]},
                **{"pinned": (PartName(1, 2, 3),), **changes},
            )  # fmt: skip
            checkpoints.commit_manifest(store, manifest)
            return manifest

        return save_step

    return for_store


def ignore(name: CheckpointName, error: DamagedCheckpoint) -> None:
    raise AssertionError(f"{name} should not be damaged") from error


def test_a_committed_checkpoint_is_read_back_and_verified(
    store: ObjectStore, save: Callable[[ObjectStore], Save]
) -> None:
    manifest = save(store)(1, 5)
    assert checkpoints.verify(store, 1, 5) == manifest
    assert checkpoints.committed(store) == [CheckpointName(1, 5)]


def test_a_checkpoint_whose_pinned_part_is_gone_is_skipped(local_store: ObjectStore, save: Any) -> None:
    save(local_store)(1, 10, pinned=())
    save(local_store)(1, 20)
    local_store.delete(layout.part(1, 2, 3))
    reported: list[str] = []
    found = checkpoints.newest_valid(
        local_store, on_damaged=lambda name, error: reported.append(f"{name.step} {error}")
    )
    assert found is not None and found.step == 10
    assert len(reported) == 1 and reported[0].startswith("20 Part trajectories/000001/000000/lease-000000002.part-003")


def test_the_newest_is_the_highest_attempt_then_step(store: ObjectStore, save: Callable[[ObjectStore], Save]) -> None:
    assert checkpoints.newest_valid(store, on_damaged=ignore) is None
    for attempt, step in ((1, 5), (1, 20), (2, 10)):
        save(store)(attempt, step)
    newest = checkpoints.newest_valid(store, on_damaged=ignore)
    assert newest is not None and newest.name == CheckpointName(2, 10)


def test_an_interrupted_save_is_no_checkpoint(local_store: ObjectStore, files: Path) -> None:
    local_store.upload(files, layout.checkpoint(1, 5))
    assert checkpoints.newest_valid(local_store, on_damaged=ignore) is None


def test_a_damaged_checkpoint_is_skipped_loudly(local_store: ObjectStore, save: Callable[[ObjectStore], Save]) -> None:
    for step in (5, 6, 7, 8):
        save(local_store)(1, step)
    data = bytearray(local_store.get(layout.checkpoint(1, 8) + "model/__0_0.distcp"))
    data[77] ^= 1
    local_store.put(layout.checkpoint(1, 8) + "model/__0_0.distcp", bytes(data))
    local_store.delete(layout.checkpoint(1, 7) + ".metadata")
    local_store.put(layout.manifest(1, 6), local_store.get(layout.manifest(1, 6)).replace(b'"cut":6', b'"cut":9'))
    skipped: list[CheckpointName] = []
    newest = checkpoints.newest_valid(local_store, on_damaged=lambda name, error: skipped.append(name))
    assert newest is not None and newest.step == 5
    assert skipped == [CheckpointName(1, 8), CheckpointName(1, 7), CheckpointName(1, 6)]


def test_manifests_that_can_be_read_are_told_from_those_that_cannot(
    local_store: ObjectStore, save: Callable[[ObjectStore], Save]
) -> None:
    manifests = [save(local_store)(1, step) for step in (5, 6, 7)]
    local_store.put(layout.manifest(1, 6), b"{}")
    skipped: list[CheckpointName] = []
    found = checkpoints.readable(local_store, on_damaged=lambda name, error: skipped.append(name))
    assert found == [manifests[0], manifests[2]] and skipped == [CheckpointName(1, 6)]


def test_a_run_without_any_intact_checkpoint_fails(
    local_store: ObjectStore, save: Callable[[ObjectStore], Save]
) -> None:
    save(local_store)(1, 5)
    local_store.delete(layout.checkpoint(1, 5) + ".metadata")
    with pytest.raises(NoValidCheckpoint, match="None of the 1"):
        checkpoints.newest_valid(local_store, on_damaged=lambda name, error: None)


def test_a_manifest_is_never_committed_before_its_files(local_store: ObjectStore) -> None:
    manifest = Manifest(1, 5, 5, {"model": FileDigest(3, "0" * 64)}, {}, 0.0)
    with pytest.raises(DamagedCheckpoint, match="model is missing"):
        checkpoints.commit_manifest(local_store, manifest)
    assert checkpoints.committed(local_store) == []


def test_a_checkpoint_is_committed_once_and_by_the_newest_attempt(
    local_store: ObjectStore, save: Callable[[ObjectStore], Save]
) -> None:
    manifest = save(local_store)(1, 5)
    with pytest.raises(Fenced, match="MANIFEST"):
        checkpoints.commit_manifest(local_store, manifest)
    for _ in range(2):
        claim_next(local_store, parent=None, **OWNER)
    with pytest.raises(Fenced, match="Attempt 1"):
        checkpoints.commit_manifest(local_store, manifest, fence=Fence(local_store, 1).check)


@pytest.mark.parametrize("name", ["../../../escape", "/etc/passwd", "a/../../b"])
def test_a_manifest_that_names_files_outside_its_directory_is_refused(local_store: ObjectStore, name: str) -> None:
    fields = {
        "attempt": 1, "step": 5, "version": 5, "files": {name: [1, "0"]}, "frontier": {}, "created_at": 0.0,
        "pinned": [], "metrics": {}, "extra": {},
    }  # fmt: skip
    local_store.put(layout.manifest(1, 5), encode_record(fields))
    with pytest.raises(DamagedCheckpoint, match="leave its directory"):
        checkpoints.verify(local_store, 1, 5)


def test_a_manifest_of_another_step_is_refused(local_store: ObjectStore, save: Callable[[ObjectStore], Save]) -> None:
    save(local_store)(1, 5)
    local_store.put(layout.manifest(1, 6), local_store.get(layout.manifest(1, 5)))
    with pytest.raises(DamagedCheckpoint, match="moved or copied"):
        checkpoints.verify(local_store, 1, 6)


def test_metrics_that_are_not_finite_are_left_out(local_store: ObjectStore) -> None:
    checkpoints.commit_manifest(local_store, Manifest(1, 5, 5, {}, {}, 0.0, metrics={"a": 1.0, "b": float("nan")}))
    assert checkpoints.read_manifest(local_store, 1, 5).metrics == {"a": 1.0}


def ranked(*rewards: float | None) -> list[Manifest]:
    metrics = [{} if reward is None else {"reward": reward} for reward in rewards]
    return [Manifest(1, step, step, {}, {}, 0.0, metrics=each) for step, each in enumerate(metrics)]


def steps(names: list[CheckpointName]) -> list[int]:
    return [name.step for name in names]


def test_retention_keeps_the_newest_the_best_and_the_protected() -> None:
    manifests = ranked(0.9, 0.1, None, 0.8, 0.2, 0.3)
    assert steps(checkpoints.to_delete(manifests, keep_last=2)) == [0, 1, 2, 3]
    assert steps(checkpoints.to_delete(manifests, keep_last=1, keep_best=2, metric="reward")) == [1, 2, 4]
    lowest = checkpoints.to_delete(manifests, keep_last=1, keep_best=1, metric="reward", higher_is_better=False)
    assert steps(lowest) == [0, 2, 3, 4]
    assert steps(checkpoints.to_delete(manifests, keep_last=1, protected=[CheckpointName(1, 2)])) == [0, 1, 3, 4]
    assert checkpoints.to_delete(manifests, keep_last=99) == []


def test_retention_never_deletes_everything() -> None:
    with pytest.raises(ValueError, match="keep_last"):
        checkpoints.to_delete(ranked(0.1), keep_last=0)


def test_an_interrupted_deletion_leaves_no_half_checkpoint(
    local_store: ObjectStore, save: Callable[[ObjectStore], Save], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(local_store)(1, 5)
    save(local_store)(1, 6)

    def killed(self: ObjectStore, prefix: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "delete_prefix", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.delete(local_store, 1, 6)
    newest = checkpoints.newest_valid(local_store, on_damaged=ignore)
    assert newest is not None and newest.step == 5
    checkpoints.delete(local_store, 1, 6)
    assert local_store.list(layout.checkpoint(1, 6), recursive=True) == []


def test_what_a_failed_save_left_is_discarded_but_never_a_checkpoint(
    store: ObjectStore, save: Callable[[ObjectStore], Save], files: Path
) -> None:
    manifest = save(store)(1, 5)
    store.upload(files, layout.checkpoint(1, 6))
    for step in (5, 6, 7):
        checkpoints.discard(store, 1, step)
    assert store.list(layout.checkpoint(1, 6), recursive=True) == []
    assert checkpoints.verify(store, 1, 5) == manifest


def test_published_weights_are_fetched_unchanged(store: ObjectStore, files: Path, tmp_path: Path) -> None:
    digests = weights.publish(store, 1, 7, files)
    assert weights.published(store, 1) == [7]
    assert weights.fetch(store, 1, 7, tmp_path / "fetched") == digests
    assert digest_directory(tmp_path / "fetched") == digests


def test_unfinished_or_deleted_weights_are_not_published(local_store: ObjectStore, files: Path, tmp_path: Path) -> None:
    local_store.upload(files, layout.weights(1, 7))
    assert weights.published(local_store, 1) == []
    with pytest.raises(ObjectMissing):
        weights.fetch(local_store, 1, 7, tmp_path / "fetched")
    weights.publish(local_store, 1, 8, files)
    weights.delete(local_store, 1, 8)
    assert weights.published(local_store, 1) == []


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_damaged_weights_are_refused(local_store: ObjectStore, files: Path, tmp_path: Path, damage: str) -> None:
    weights.publish(local_store, 1, 7, files)
    key = layout.weights(1, 7) + ".metadata"
    if damage == "flip":
        local_store.put(key, b"metadatA")
    else:
        local_store.delete(key)
    with pytest.raises(StorageError, match=r"\.metadata is missing or altered"):
        weights.fetch(local_store, 1, 7, tmp_path / "fetched")
