"""Policy weights in the store: a directory per version, made real by a record of digests written last.

A version is full, or the difference to an earlier version of its attempt, which its record names: whoever wants it
follows the chain from the newest full version, or from a version it has already. A version that others rest on is
deleted only together with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from storage import layout
from storage.digests import FileDigest, check_files, digest_directory, digest_file, digests_from, fields_of
from storage.errors import DamagedCheckpoint, DamagedRecord, InvalidKey
from storage.objects import ObjectStore
from storage.records import read_record, write_record


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """A complete version. `base` is the version it is the difference to, None when it is full."""

    attempt: int
    version: int
    base: int | None
    files: Mapping[str, FileDigest]

    @property
    def bytes(self) -> int:
        return sum(digest.bytes for digest in self.files.values())


def publish(
    store: ObjectStore,
    attempt: int,
    version: int,
    directory: Path,
    *,
    base: int | None = None,
    fence: Callable[[], None] | None = None,
) -> dict[str, FileDigest]:
    """Upload the files of a local directory as `attempt.version`; return their digests.

    Raise Fenced when a newer attempt owns the run, or another process published this version.
    """
    prefix = layout.weights(attempt, version)
    digests = digest_directory(directory)
    store.upload(directory, prefix)
    check_files(store, prefix, digests, contents=False)
    if fence is not None:
        fence()
    write_record(store, layout.weights_digests(attempt, version), {"files": fields_of(digests), "base": base})
    return digests


def published(store: ObjectStore, attempt: int) -> list[int]:
    """Complete versions of an attempt, ascending."""
    names = (layout.parse_weights(directory) for directory in store.directories(layout.weights_prefix(attempt)))
    versions = sorted(name.version for name in names if name is not None)
    return [version for version in versions if store.exists(layout.weights_digests(attempt, version))]


def describe(store: ObjectStore, attempt: int, version: int) -> PublishedWeights:
    """What a version is made of. Raise ObjectMissing when it is not published, DamagedCheckpoint for a bad record."""
    key = layout.weights_digests(attempt, version)
    try:
        fields = read_record(store, key)
        base = None if fields["base"] is None else int(fields["base"])
        return PublishedWeights(attempt, version, base, digests_from(fields["files"]))
    except (DamagedRecord, InvalidKey, KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedCheckpoint(f"Digests {key} cannot be used: {error}") from error


def chain(
    store: ObjectStore, attempt: int, version: int, *, have: Callable[[PublishedWeights], bool] | None = None
) -> list[PublishedWeights]:
    """The versions to apply, in order, to get `version`: from the newest full one, or on top of one that `have` knows,
    which is then the base of the first.

    Empty when `have` knows `version`. Raise ObjectMissing or DamagedCheckpoint when a link cannot be used.
    """
    links: list[PublishedWeights] = []
    needed: int | None = version
    while needed is not None:
        link = describe(store, attempt, needed)
        if have is not None and have(link):
            break
        if link.base is not None and link.base >= needed:
            raise DamagedCheckpoint(f"Weights {attempt}.{needed} rest on the later version {link.base}: publish again.")
        links.append(link)
        needed = link.base
    return links[::-1]


def fetch(store: ObjectStore, attempt: int, version: int, directory: Path) -> dict[str, FileDigest]:
    """Download a version into a local directory and verify every file; return the digests.

    Raise ObjectMissing when it is not published, DamagedCheckpoint when a file does not match.
    """
    digests = dict(describe(store, attempt, version).files)
    store.download(layout.weights(attempt, version), directory)
    for name, expected in digests.items():
        path = directory / name
        if not path.is_file() or digest_file(path) != expected:
            raise DamagedCheckpoint(
                f"File {layout.weights(attempt, version)}{name} is missing or altered: publish again."
            )
    (directory / layout.weights_digests(attempt, version).rpartition("/")[2]).unlink()
    return digests


def surplus(versions: Sequence[PublishedWeights], *, keep: int) -> list[int]:
    """The versions, ascending, that none of the `keep` newest rests on. Pure."""
    by_number = {link.version: link for link in versions}
    needed: set[int] = set()
    for number in sorted(by_number)[-keep:]:
        while number in by_number and number not in needed:
            needed.add(number)
            base = by_number[number].base
            number = -1 if base is None else base
    return sorted(by_number.keys() - needed)


def delete_attempts_before(store: ObjectStore, attempt: int) -> None:
    """Delete the weights of all earlier attempts: their engines are refitted by this one."""
    for prefix in store.directories(layout.weights_prefix()):
        if prefix < layout.weights_prefix(attempt):
            store.delete_prefix(prefix)


def delete(store: ObjectStore, attempt: int, version: int) -> None:
    """Delete the digests first, so that an interrupted deletion leaves nothing that looks complete."""
    store.delete(layout.weights_digests(attempt, version))
    store.delete_prefix(layout.weights(attempt, version))
