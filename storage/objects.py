"""The object store: whole objects under keys, with an exclusive create.

Invariants. An object is visible whole or not at all. Of any number of `put_if_absent` of one key exactly one is
true. A store that does not keep this promise cannot be opened: several S3 servers accept the condition and ignore it.
Keys come from numbers (`storage.layout`) or are checked; none can leave the root. Remote requests have a deadline and
a bounded number of retries. A store may be used from many threads, and from a forked child, which connects anew
(obstore refuses that).

A "false" of `put_if_absent` may be our own success whose answer was lost on the way. `commit` tells the two apart, for
data that holds something only this writer knows.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import tenacity

from storage.errors import InvalidKey, ObjectMissing, StorageError, StoreFull, StoreRefused, StoreUnavailable
from storage.local import LocalObjects
from storage.remote import FsspecObjects, ObstoreObjects

Client = Literal["fsspec", "obstore"]
Answer = TypeVar("Answer")
Keys: TypeAlias = list[str]
Paths: TypeAlias = list[Path]
Listing: TypeAlias = list[tuple[str, int, float]]

# Requests that a reader of many objects has under way at a time.
PARALLEL_REQUESTS = 8
RETRY_SECONDS = 120.0
TRIES = 6
DIGEST_BYTES = 32 * 2**20

_KEY_SEGMENT = re.compile(r"[A-Za-z0-9._=+@-]{1,255}")
_KEY_LENGTH = 900
_NETWORK_PACKAGES = ("aiobotocore", "aiohttp", "botocore", "gcsfs", "google", "azure", "obstore")
_HOPELESS = (
    "InvalidPathError",
    "NoCredentialsError",
    "NotSupportedError",
    "ParamValidationError",
    "PartialCredentialsError",
    "PermissionDeniedError",
    "UnauthenticatedError",
    "UnknownConfigurationKeyError",
)


LOCAL_POLL_SECONDS, REMOTE_POLL_SECONDS = 0.03, 0.5


class Objects(Protocol):
    """What a kind of storage must offer. Keys are already checked; errors are Python's own."""

    remote: bool

    def prepare(self) -> None: ...
    def create(self, key: str, data: bytes) -> bool: ...
    def put(self, key: str, data: bytes) -> None: ...
    def upload_file(self, local: Path, key: str) -> None: ...
    def download_file(self, key: str, local: Path) -> None: ...
    def get(self, key: str) -> bytes: ...
    def get_range(self, key: str, start: int, length: int) -> bytes: ...
    def get_tail(self, key: str, length: int) -> bytes: ...
    def size(self, key: str) -> int | None: ...
    def list(self, prefix: str, recursive: bool) -> Keys: ...
    def entries(self, prefix: str) -> Listing: ...
    def directories(self, prefix: str) -> Keys: ...
    def delete(self, key: str) -> None: ...
    def delete_all(self, prefix: str) -> None: ...


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """An object in a listing. `written_at` is in Unix seconds by the clock of the store;
    infinite if it does not say."""

    key: str
    bytes: int
    written_at: float


Entries: TypeAlias = list[Entry]


class ObjectStore:
    """Open with `ObjectStore.open`. Every method may raise StoreUnavailable, StoreRefused or StoreFull."""

    def __init__(self, url: str, connect: Callable[[], Objects]) -> None:
        self.url = url
        self._connect = connect
        self._connected_by = os.getpid()
        self._objects = connect()

    @classmethod
    def open(
        cls,
        url: str,
        storage_options: Mapping[str, Any] | None = None,
        *,
        client: Client = "fsspec",
        read_only: bool = False,
    ) -> ObjectStore:
        """Connect to `url` (a path or any fsspec URL); unless `read_only`, first prove that create is exclusive.

        `storage_options` are those of the fsspec file system. `client="obstore"` serves s3, gs and az with a tenth of
        the CPU time per request. Raise StoreRefused with the reason when the store cannot be used.
        """
        options = dict(storage_options or {})
        store = cls(url, _connection(url, options, client))
        if not read_only:
            store._prove_exclusive_create()
        return store

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Whether this call made the object. False may also be a lost answer of our own: see `commit`."""
        _check_key(key)
        return self._call(key, lambda objects: objects.create(key, data))

    def commit(self, key: str, data: bytes) -> bool:
        """Put if absent; true when the object is ours. `data` must hold a nonce that no other writer has."""
        return self.put_if_absent(key, data) or self.get(key) == data

    def put(self, key: str, data: bytes) -> None:
        """Overwrite atomically. Only for hints: nothing may be decided by an object that can change."""
        _check_key(key)
        self._call(key, lambda objects: objects.put(key, data))

    def get(self, key: str) -> bytes:
        """Raise ObjectMissing when there is none."""
        _check_key(key)
        return self._call(key, lambda objects: objects.get(key))

    def get_tail(self, key: str, length: int) -> bytes:
        """The last `length` bytes, or the whole object when it is shorter."""
        _check_key(key)
        return self._call(key, lambda objects: objects.get_tail(key, length))

    def exists(self, key: str) -> bool:
        _check_key(key)
        return self._call(key, lambda objects: objects.size(key)) is not None

    def size(self, key: str) -> int:
        """Bytes of an object. Raise ObjectMissing when there is none."""
        _check_key(key)
        size = self._call(key, lambda objects: objects.size(key))
        if size is None:
            raise ObjectMissing(f"There is no object {key} in {self.url}.")
        return size

    def digest(self, key: str) -> tuple[int, str]:
        """Size and hexadecimal SHA-256, read in pieces so that large files fit in memory."""
        size = self.size(key)
        digest = hashlib.sha256()
        for start in range(0, size, DIGEST_BYTES):
            digest.update(self._get_range(key, start, min(DIGEST_BYTES, size - start)))
        return size, digest.hexdigest()

    def list(self, prefix: str, *, recursive: bool = False) -> Keys:
        """Sorted keys that begin with `prefix`, which may end inside a file name; sub-directories only if recursive."""
        _check_prefix(prefix)
        return sorted(self._call(prefix, lambda objects: objects.list(prefix, recursive)))

    def entries(self, prefix: str) -> Entries:
        """Every object below the directory `prefix`, sorted by key, as listings alone tell of it."""
        _check_prefix(prefix, directory=True)
        return sorted(Entry(*each) for each in self._call(prefix, lambda objects: objects.entries(prefix)))

    def directories(self, prefix: str) -> Keys:
        """Sorted prefixes, each ending in `/`, of the directories directly below the directory `prefix`."""
        _check_prefix(prefix, directory=True)
        return sorted(self._call(prefix, lambda objects: objects.directories(prefix)))

    def delete(self, key: str) -> None:
        """Deleting what is not there is no error, so a repeated clean-up ends the same."""
        _check_key(key)
        self._call(key, lambda objects: objects.delete(key))

    def delete_prefix(self, prefix: str) -> None:
        """Delete every object below the directory `prefix`, which must not be the root."""
        _check_prefix(prefix, directory=True)
        if not prefix:
            raise InvalidKey(f"Refusing to delete all of {self.url}: name a directory below it.")
        self._call(prefix, lambda objects: objects.delete_all(prefix))

    def local_path(self, key: str) -> Path | None:
        """Where the object or directory is (or would be) on this machine's file system; None for a remote store."""
        _check_prefix(key)
        objects = self._current()
        return objects.root / key if isinstance(objects, LocalObjects) else None

    @property
    def poll_seconds(self) -> float:
        """A fair pause between two looks at the store: short for a directory, longer where each look is a request."""
        return LOCAL_POLL_SECONDS if self.local_path("") is not None else REMOTE_POLL_SECONDS

    def upload(self, directory: Path, prefix: str) -> Keys:
        """Copy every file below a local directory to `prefix`; return their keys. Each file appears atomically."""
        _check_prefix(prefix, directory=True)
        keys = []
        for path in sorted(path for path in directory.rglob("*") if path.is_file()):
            key = prefix + path.relative_to(directory).as_posix()
            _check_key(key)
            self._upload_file(path, key)
            keys.append(key)
        return keys

    def download(self, prefix: str, directory: Path) -> Paths:
        """Copy every object below `prefix` into a local directory; return the files."""
        _check_prefix(prefix, directory=True)
        paths = []
        for key in self.list(prefix, recursive=True):
            _check_key(key)
            path = directory / key[len(prefix) :]
            path.parent.mkdir(parents=True, exist_ok=True)
            self._download_file(key, path)
            paths.append(path)
        return paths

    def _get_range(self, key: str, start: int, length: int) -> bytes:
        return self._call(key, lambda objects: objects.get_range(key, start, length))

    def _upload_file(self, path: Path, key: str) -> None:
        self._call(key, lambda objects: objects.upload_file(path, key))

    def _download_file(self, key: str, path: Path) -> None:
        self._call(key, lambda objects: objects.download_file(key, path))

    def _current(self) -> Objects:
        if os.getpid() != self._connected_by:
            # Sockets and event loops of the parent are useless in a forked child, and a Rust runtime hangs there.
            if isinstance(self._objects, ObstoreObjects):
                raise StoreRefused(
                    f"The obstore client of {self.url} was inherited by a fork: start processes by spawn."
                )
            self._objects = self._connect()
            self._connected_by = os.getpid()
        return self._objects

    def _call(self, key: str, action: Callable[[Objects], Answer]) -> Answer:
        objects = self._current()
        place = f"{self.url.rstrip('/')}/{key}"
        if not objects.remote:
            return _translated(place, lambda: action(objects))
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(TRIES) | tenacity.stop_after_delay(RETRY_SECONDS),
            wait=tenacity.wait_random_exponential(multiplier=0.1, max=10),
            retry=tenacity.retry_if_exception(is_transient),
            reraise=True,
        )
        return _translated(place, lambda: retrying(action, objects))

    def _prove_exclusive_create(self) -> None:
        key = f".probe-{secrets.token_hex(8)}"
        try:
            self._call("", lambda objects: objects.prepare())
            self._call(key, lambda objects: objects.create(key, b"first"))  # a lost answer may say false; `kept` tells
            try:
                second = self._call(key, lambda objects: objects.create(key, b"second"))
                kept = self._call(key, lambda objects: objects.get(key))
            finally:
                self._call(key, lambda objects: objects.delete(key))
        except ObjectMissing as error:
            raise StoreRefused(
                f"Cannot write to {self.url}: it does not exist and cannot be made; make its bucket."
            ) from error
        if second or kept != b"first":
            raise StoreRefused(
                f"The store {self.url} lets a second writer replace an object that must be created only once, so two "
                "processes could both win the same name: use a store that honours conditional writes (If-None-Match)."
            )


def is_transient(error: BaseException) -> bool:
    """Whether the same request may well succeed when it is sent again."""
    if isinstance(error, StorageError | FileNotFoundError | FileExistsError | PermissionError | IsADirectoryError):
        return False
    if isinstance(error, OSError):
        return error.errno not in (errno.ENOSPC, errno.EDQUOT)
    return type(error).__module__.partition(".")[0] in _NETWORK_PACKAGES and type(error).__name__ not in _HOPELESS


def _connection(url: str, options: dict[str, Any], client: Client) -> Callable[[], Objects]:
    protocol, separator, rest = url.partition("://")
    if not separator or protocol in ("file", "local"):
        root = Path(rest if separator else url).expanduser().absolute()
        return lambda: LocalObjects(root)
    if client == "obstore":
        return lambda: _translated(url, lambda: ObstoreObjects(url, options))
    return lambda: _translated(url, lambda: FsspecObjects(url, options))


def _translated(place: str, action: Callable[[], Answer]) -> Answer:
    """Give an error of the operating system, or of a client library, its type and its sentence."""
    try:
        return action()
    except StorageError:
        raise
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise ObjectMissing(f"There is no object at {place}.") from error
    except PermissionError as error:
        raise StoreRefused(f"No access to {place}: {_reason(error)}; check its permissions or credentials.") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(f"No space left to write {place}: free some space, then continue the run.") from error
        raise StoreUnavailable(f"The store failed at {place}: {_reason(error)}.") from error
    except ImportError as error:
        raise StoreRefused(
            f"Cannot open {place}: {_reason(error)}; install the package for this kind of store."
        ) from error
    except ValueError as error:
        raise StoreRefused(f"Cannot open or use {place}: {_reason(error)}; check its URL and options.") from error
    except Exception as error:
        if type(error).__name__ in _HOPELESS:
            raise StoreRefused(f"No access to {place}: {_reason(error)}; check its credentials.") from error
        if is_transient(error):
            raise StoreUnavailable(f"The store failed at {place}: {_reason(error)}.") from error
        raise


def _reason(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__} {lines[0].strip()[:300]}".rstrip(" .")


def _check_key(key: str) -> None:
    segments = key.split("/")
    if len(key) > _KEY_LENGTH or not all(_KEY_SEGMENT.fullmatch(part) and part.strip(".") for part in segments):
        raise InvalidKey(
            f"Key {key[:200]!r} is not a plain relative path: "
            "use segments of letters, digits and . _ = + @ - joined by single slashes."
        )
    if segments[0].startswith("."):
        raise InvalidKey(f"Key {key!r} begins with a dot: such names at the root belong to the store itself.")


def _check_prefix(prefix: str, *, directory: bool = False) -> None:
    if directory and prefix and not prefix.endswith("/"):
        raise InvalidKey(f"Prefix {prefix!r} must name a directory: end it with a slash.")
    if prefix:
        _check_key(prefix.removesuffix("/"))
