"""Directories of files whose completeness is one record of sizes and SHA-256 digests, written last."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from storage.errors import DamagedCheckpoint, InvalidKey, ObjectMissing
from storage.objects import DIGEST_BYTES, ObjectStore


@dataclass(frozen=True, slots=True)
class FileDigest:
    bytes: int
    sha256: str


def digest_directory(directory: Path) -> dict[str, FileDigest]:
    """Digests of all files below a local directory, by relative POSIX name."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): digest_file(path) for path in files}


def digest_file(path: Path) -> FileDigest:
    digest = hashlib.sha256()
    size = 0
    with open(path, "rb") as file:
        while chunk := file.read(DIGEST_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return FileDigest(size, digest.hexdigest())


def check_files(store: ObjectStore, prefix: str, files: Mapping[str, FileDigest], *, contents: bool = True) -> None:
    """Raise DamagedCheckpoint naming the first file below `prefix` that is missing, of another size, or altered.

    Without `contents` only the sizes are compared.
    """
    for name, expected in sorted(files.items()):
        key = prefix + name
        try:
            size, sha256 = store.digest(key) if contents else (store.size(key), expected.sha256)
        except ObjectMissing as error:
            raise DamagedCheckpoint(f"File {key} is missing: the directory is not complete.") from error
        if size != expected.bytes:
            raise DamagedCheckpoint(
                f"File {key} has {size} bytes instead of {expected.bytes}: it is not what was written."
            )
        if sha256 != expected.sha256:
            raise DamagedCheckpoint(f"File {key} has digest {sha256[:12]}… instead of {expected.sha256[:12]}….")


def fields_of(files: Mapping[str, FileDigest]) -> dict[str, list[int | str]]:
    """As JSON: name to [bytes, sha256]."""
    return {name: [digest.bytes, digest.sha256] for name, digest in sorted(files.items())}


def digests_from(fields: Mapping[str, tuple[int, str]]) -> dict[str, FileDigest]:
    """The inverse of `fields_of`. Raise InvalidKey for a name that would leave its directory."""
    for name in fields:
        if name.startswith("/") or ".." in name.split("/"):
            raise InvalidKey(f"File name {name!r} would leave its directory: the record is not to be trusted.")
    return {name: FileDigest(int(size), str(sha256)) for name, (size, sha256) in fields.items()}
