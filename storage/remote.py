"""Objects behind fsspec (S3, GCS, Azure, memory), and behind obstore as a faster client for the same services.

Both classes offer the same dozen calls and raise built-in errors: FileNotFoundError for no object, PermissionError for
no access, `Conflict` when a conditional request should be tried again. One object is one PUT, so it appears whole.
Nothing is cached: no instances (they would be shared with other settings) and no listings (they would hide what other
processes write). Every request has a deadline.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

import fsspec

Keys: TypeAlias = list[str]
Listing: TypeAlias = list[tuple[str, int, float]]

REQUEST_SECONDS = 60.0
TRANSFER_SECONDS = 1800.0
CONNECT_SECONDS = 10.0
LARGEST_PUT = 5 * 2**30

_MEMORY_LOCK = threading.Lock()


class Conflict(OSError):
    """The service could not decide a conditional request now; trying again is right."""


class FsspecObjects:
    """`create` sends the service's own condition (If-None-Match, generation match), never a check before a write."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        protocol = fsspec.core.split_protocol(url)[0]
        self._is_s3 = protocol in ("s3", "s3a")
        self._lists_by_name = protocol in ("s3", "s3a", "gs", "gcs")
        settings = _s3_settings(options) if self._is_s3 else options
        self._fs, path = fsspec.core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False, **settings)
        self.root = path.rstrip("/")
        self.remote = bool(getattr(self._fs, "async_impl", False))
        # fsspec's memory files check and then write; no other process can see them, so a lock makes that one act.
        self._creating = nullcontext() if self.remote else _MEMORY_LOCK

    def prepare(self) -> None:
        """Nothing to make: buckets belong to the user, and prefixes come into being with their first object."""

    def create(self, key: str, data: bytes) -> bool:
        """Write an object that is not there yet; whether it was not. Raise Conflict when the service cannot say."""
        try:
            with self._creating:
                self._fs.pipe_file(self._path(key), data, mode="create", **self._single_put(), **self._within())
        except FileExistsError:
            return False
        except OSError as error:
            code = _service_code(error)
            if code == "PreconditionFailed":
                return False
            if code == "ConditionalRequestConflict":
                raise Conflict(f"conflicting conditional requests for {key}") from error
            raise
        return True

    def put(self, key: str, data: bytes) -> None:
        self._fs.pipe_file(self._path(key), data, **self._single_put(), **self._within())

    def upload_file(self, local: Path, key: str) -> None:
        self._fs.put_file(str(local), self._path(key), **self._within(TRANSFER_SECONDS))

    def download_file(self, key: str, local: Path) -> None:
        self._fs.get_file(self._path(key), str(local), **self._within(TRANSFER_SECONDS))

    def get(self, key: str) -> bytes:
        return bytes(self._fs.cat_file(self._path(key), **self._within()))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return bytes(self._fs.cat_file(self._path(key), start=start, end=start + length, **self._within()))

    def get_tail(self, key: str, length: int) -> bytes:
        return bytes(self._fs.cat_file(self._path(key), start=-length, **self._within()))

    def size(self, key: str) -> int | None:
        try:
            info = self._fs.info(self._path(key), **self._within())
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def list(self, prefix: str, recursive: bool) -> Keys:
        """The keys that begin so; without `recursive` those of one level."""
        directory, _, name = prefix.rpartition("/")
        by_name = {"prefix": name} if name and self._lists_by_name else {}
        try:
            if recursive or by_name:
                found = self._fs.find(self._path(directory), **by_name, **self._within())
            else:
                entries = self._fs.ls(self._path(directory), detail=True, **self._within())
                found = [entry["name"] for entry in entries if entry["type"] == "file"]
        except FileNotFoundError:
            return []
        below = directory + "/" if directory else ""
        keys = [self._key(path) for path in found]
        return [key for key in keys if key.startswith(prefix) and (recursive or "/" not in key[len(below) :])]

    def entries(self, prefix: str) -> Listing:
        try:
            found = self._fs.find(self._path(prefix.rstrip("/")), detail=True, **self._within())
        except FileNotFoundError:
            return []
        return [(self._key(path), int(info["size"]), _written_at(info)) for path, info in found.items()]

    def directories(self, prefix: str) -> Keys:
        try:
            entries = self._fs.ls(self._path(prefix.rstrip("/")), detail=True, **self._within())
        except FileNotFoundError:
            return []
        return [self._key(entry["name"]) + "/" for entry in entries if entry["type"] == "directory"]

    def delete(self, key: str) -> None:
        try:
            self._fs.rm_file(self._path(key), **self._within())
        except FileNotFoundError:
            return

    def delete_all(self, prefix: str) -> None:
        paths = [self._path(key) for key in self.list(prefix, recursive=True)]
        if paths:
            self._fs.rm(paths, **self._within(TRANSFER_SECONDS))

    def _path(self, key: str) -> str:
        return f"{self.root}/{key}" if key else self.root

    def _key(self, path: str) -> str:
        return path.strip("/").removeprefix(self.root.strip("/")).strip("/")

    def _single_put(self) -> dict[str, int]:
        return {"chunksize": LARGEST_PUT // 2} if self._is_s3 else {}

    def _within(self, seconds: float = REQUEST_SECONDS) -> dict[str, float]:
        return {"timeout": seconds} if self.remote else {}


class ObstoreObjects:
    """The same calls through obstore's Rust client. It does not survive a fork; use spawn."""

    remote = True

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        import obstore
        from obstore.exceptions import AlreadyExistsError
        from obstore.store import from_url

        self._obstore = obstore
        self._already_exists = AlreadyExistsError
        client: Any = {"timeout": f"{REQUEST_SECONDS:.0f}s", "connect_timeout": f"{CONNECT_SECONDS:.0f}s"}
        settings = _obstore_settings(options) if url.startswith(("s3://", "s3a://")) else options
        if str(settings.get("endpoint", "")).startswith("http://"):
            client["allow_http"] = True
        connect: Any = from_url  # its overloads name each service's settings; the user's are checked by the client
        self._store: Any = connect(url, client_options=client, **settings)

    def prepare(self) -> None:
        """Nothing to make: buckets belong to the user, and prefixes come into being with their first object."""

    def create(self, key: str, data: bytes) -> bool:
        """Write an object that is not there yet; whether it was not. Raise Conflict when the service cannot say."""
        try:
            self._obstore.put(self._store, key, data, mode="create", use_multipart=False)
        except self._already_exists as error:
            # The client reports an undecided 409 in the same way: only an object that is there has won.
            if self.size(key) is None:
                raise Conflict(f"conflicting conditional requests for {key}") from error
            return False
        return True

    def put(self, key: str, data: bytes) -> None:
        self._obstore.put(self._store, key, data, use_multipart=False)

    def upload_file(self, local: Path, key: str) -> None:
        self._obstore.put(self._store, key, local)

    def download_file(self, key: str, local: Path) -> None:
        with open(local, "wb") as file:
            for chunk in self._obstore.get(self._store, key).stream():
                file.write(chunk)

    def get(self, key: str) -> bytes:
        return bytes(self._obstore.get(self._store, key).bytes())

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return bytes(self._obstore.get_range(self._store, key, start=start, length=length))

    def get_tail(self, key: str, length: int) -> bytes:
        return bytes(self._obstore.get(self._store, key, options={"range": {"suffix": length}}).bytes())

    def size(self, key: str) -> int | None:
        try:
            return int(self._obstore.head(self._store, key)["size"])
        except FileNotFoundError:
            return None

    def list(self, prefix: str, recursive: bool) -> Keys:
        """The keys that begin so; without `recursive` those of one level."""
        directory = prefix.rpartition("/")[0] or None
        if recursive:
            found = [entry["path"] for batch in self._obstore.list(self._store, directory) for entry in batch]
        else:
            found = [entry["path"] for entry in self._obstore.list_with_delimiter(self._store, directory)["objects"]]
        return [key for key in found if key.startswith(prefix)]

    def entries(self, prefix: str) -> Listing:
        batches = self._obstore.list(self._store, prefix.rstrip("/") or None)
        return [
            (entry["path"], int(entry["size"]), entry["last_modified"].timestamp())
            for batch in batches
            for entry in batch
        ]

    def directories(self, prefix: str) -> Keys:
        listing = self._obstore.list_with_delimiter(self._store, prefix.rstrip("/") or None)
        return [path + "/" for path in listing["common_prefixes"]]

    def delete(self, key: str) -> None:
        try:
            self._obstore.delete(self._store, key)
        except FileNotFoundError:
            return

    def delete_all(self, prefix: str) -> None:
        keys = self.list(prefix, recursive=True)
        if keys:
            self._obstore.delete(self._store, keys)


def _written_at(info: Mapping[str, Any]) -> float:
    """When an object was last written. Each file system has a word of its own for it;
    one that has none knows no age."""
    for word in ("LastModified", "last_modified", "mtime", "updated", "created"):
        match info.get(word):
            case datetime() as moment:
                return moment.timestamp()
            case str() as text:
                return datetime.fromisoformat(text).timestamp()
            case float() | int() as seconds:
                return float(seconds)
    return math.inf


def _service_code(error: BaseException) -> str | None:
    """The error code in the service's answer, which botocore keeps on the error that fsspec translated."""
    response = getattr(error.__cause__, "response", None)
    return response.get("Error", {}).get("Code") if isinstance(response, dict) else None


def _s3_settings(options: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {"connect_timeout": CONNECT_SECONDS, "read_timeout": REQUEST_SECONDS}
    if "endpoint_url" in options:
        # Older servers answer 411 to the checksum trailers that botocore adds by default, or store them in the object.
        config |= {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
    return {**options, "config_kwargs": config | options.get("config_kwargs", {})}


def _obstore_settings(options: dict[str, Any]) -> dict[str, Any]:
    """Say in obstore's words what the user said in s3fs's."""
    client = options.get("client_kwargs", {})
    settings = {
        "access_key_id": options.get("key"),
        "secret_access_key": options.get("secret"),
        "session_token": options.get("token"),
        "endpoint": options.get("endpoint_url", client.get("endpoint_url")),
        "region": client.get("region_name"),
        "skip_signature": options.get("anon"),
    }
    return {name: value for name, value in settings.items() if value is not None}
