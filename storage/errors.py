"""Every way bytes at rest can fail, as one family of typed errors.

Each message is one sentence: what happened, where, the offending value, and what to do.
"""

from __future__ import annotations


class StorageError(Exception):
    """Anything that went wrong with stored bytes."""


class StoreRefused(StorageError):
    """The store cannot be opened: no access, no bucket, or it does not honour put-if-absent."""


class StoreUnavailable(StorageError):
    """A remote request still failed when its retries were used up."""


class StoreFull(StorageError):
    """There is no room for the object; nothing of it became visible."""


class ObjectMissing(StorageError):
    """No object has this key."""


class InvalidKey(StorageError, ValueError):
    """A key, file name or run id that could leave its place in the store."""


class Fenced(StorageError):
    """A newer attempt owns the run, or another process wrote what only this one may write: stop at once."""


class DamagedRecord(StorageError):
    """A JSON record does not match its own digest, or lacks a field."""


class DamagedShard(StorageError):
    """A Parquet object is truncated or altered."""


class UnknownSchema(StorageError):
    """An object was written with a newer schema than this code knows."""


class DamagedCheckpoint(StorageError):
    """A file of a committed checkpoint, or of published weights, is missing or altered."""


class NoValidCheckpoint(StorageError):
    """Checkpoints exist, but none of them is intact."""
