"""Policy weights for engines that join late: a directory per version, made real by a record of digests written last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from storage import layout
from storage.digests import FileDigest, check_files, digest_directory, digest_file, digests_from, fields_of
from storage.errors import DamagedCheckpoint, DamagedRecord, InvalidKey
from storage.objects import ObjectStore
from storage.records import read_record, write_record


def publish(
    store: ObjectStore, attempt: int, version: int, directory: Path, *, fence: Callable[[], None] | None = None
) -> dict[str, FileDigest]:
    """Upload the files (safetensors, and what a model needs beside them) of a local directory as `attempt.version`.

    Raise Fenced when a newer attempt owns the run, or another process published this version.
    """
    prefix = layout.weights(attempt, version)
    digests = digest_directory(directory)
    store.upload(directory, prefix)
    check_files(store, prefix, digests, contents=False)
    if fence is not None:
        fence()
    write_record(store, layout.weights_digests(attempt, version), {"files": fields_of(digests)})
    return digests


def published(store: ObjectStore, attempt: int) -> list[int]:
    """Complete versions of an attempt, ascending."""
    names = (layout.parse_weights(directory) for directory in store.directories(layout.weights_prefix(attempt)))
    versions = sorted(name.version for name in names if name is not None)
    return [version for version in versions if store.exists(layout.weights_digests(attempt, version))]


def fetch(store: ObjectStore, attempt: int, version: int, directory: Path) -> dict[str, FileDigest]:
    """Download a version into a local directory and verify every file; return the digests.

    Raise ObjectMissing when it is not published, DamagedCheckpoint when a file does not match.
    """
    key = layout.weights_digests(attempt, version)
    try:
        digests = digests_from(read_record(store, key)["files"])
    except (DamagedRecord, InvalidKey, KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedCheckpoint(f"Digests {key} cannot be used: {error}") from error
    store.download(layout.weights(attempt, version), directory)
    for name, expected in digests.items():
        path = directory / name
        if not path.is_file() or digest_file(path) != expected:
            raise DamagedCheckpoint(
                f"File {layout.weights(attempt, version)}{name} is missing or altered: publish again."
            )
    (directory / key.rpartition("/")[2]).unlink()
    return digests


def delete(store: ObjectStore, attempt: int, version: int) -> None:
    """Delete the digests first, so that an interrupted deletion leaves nothing that looks complete."""
    store.delete(layout.weights_digests(attempt, version))
    store.delete_prefix(layout.weights(attempt, version))
