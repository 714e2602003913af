"""Versions of the policy are followed from the newest full one, and none is deleted that another rests on."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage import layout, weights
from storage.errors import DamagedCheckpoint, Fenced, ObjectMissing
from storage.objects import ObjectStore
from storage.records import write_record
from storage.weights import PublishedWeights


@pytest.fixture
def files(tmp_path: Path) -> Path:
    directory = tmp_path / "files"
    directory.mkdir()
    (directory / "weights.safetensors").write_bytes(b"some weights")
    return directory


def publish(store: ObjectStore, files: Path, bases: list[int | None]) -> None:
    for version, base in enumerate(bases):
        weights.publish(store, 1, version, files, base=base)


def numbers(links: list[PublishedWeights]) -> list[int]:
    return [link.version for link in links]


def test_a_chain_begins_at_the_newest_full_version(store: ObjectStore, files: Path) -> None:
    publish(store, files, [None, 0, 1, None, 3, 4])
    assert numbers(weights.chain(store, 1, 5)) == [3, 4, 5]
    assert numbers(weights.chain(store, 1, 2)) == [0, 1, 2]
    assert numbers(weights.chain(store, 1, 3)) == [3]


def test_a_chain_is_only_what_is_missing(local_store: ObjectStore, files: Path) -> None:
    publish(local_store, files, [None, 0, 1, 2])
    assert numbers(weights.chain(local_store, 1, 3, have=lambda link: link.version == 2)) == [3]
    assert weights.chain(local_store, 1, 3, have=lambda link: link.version == 3) == []
    assert numbers(weights.chain(local_store, 1, 1, have=lambda link: link.version == 3)) == [0, 1]


def test_a_chain_with_a_missing_or_turned_link_is_refused(local_store: ObjectStore, files: Path) -> None:
    publish(local_store, files, [None, 0, 1])
    weights.delete(local_store, 1, 1)
    with pytest.raises(ObjectMissing):
        weights.chain(local_store, 1, 2)
    weights.publish(local_store, 2, 0, files, base=0)
    with pytest.raises(DamagedCheckpoint, match="rest on the later version 0"):
        weights.chain(local_store, 2, 0)


def test_a_record_of_another_kind_is_no_version(local_store: ObjectStore) -> None:
    write_record(local_store, layout.weights_digests(1, 0), {"files": {"../x": [1, "a"]}, "base": None})
    with pytest.raises(DamagedCheckpoint, match="cannot be used"):
        weights.describe(local_store, 1, 0)


def test_a_fenced_trainer_publishes_nothing(local_store: ObjectStore, files: Path) -> None:
    def fence() -> None:
        raise Fenced("a newer attempt owns the run")

    with pytest.raises(Fenced):
        weights.publish(local_store, 1, 0, files, fence=fence)
    assert weights.published(local_store, 1) == []


@pytest.mark.parametrize(
    ("bases", "keep", "surplus"),
    [
        ([None, 0, 1, 2], 2, []),
        ([None, 0, None, 2], 2, [0, 1]),
        ([None, 0, None, 2], 3, []),
        ([None, None, None], 2, [0]),
        ([None], 2, []),
        ([], 2, []),
    ],
)
def test_what_no_kept_version_rests_on_is_surplus(bases: list[int | None], keep: int, surplus: list[int]) -> None:
    versions = [PublishedWeights(1, version, base, {}) for version, base in enumerate(bases)]
    assert weights.surplus(versions, keep=keep) == surplus


def test_weights_of_earlier_attempts_can_be_deleted(store: ObjectStore, files: Path) -> None:
    for attempt in (1, 2, 3):
        weights.publish(store, attempt, 0, files)
    weights.delete_attempts_before(store, 3)
    assert [weights.published(store, attempt) for attempt in (1, 2, 3)] == [[], [], [0]]
