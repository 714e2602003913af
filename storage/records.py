"""Small JSON records, each carrying the digest of its content and the nonce of its writer.

The digest turns a truncated or altered record into DamagedRecord instead of a wrong decision; the nonce lets a writer
recognise its own record after a lost answer.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from typing import Any

from storage.errors import DamagedRecord, Fenced
from storage.objects import ObjectStore


def new_writer() -> str:
    """A nonce that no other writer has."""
    return secrets.token_hex(16)


def encode_record(fields: Mapping[str, Any]) -> bytes:
    """UTF-8 JSON of `fields` plus `writer` and `sha256`. Raise ValueError for NaN or infinity."""
    content = {**fields, "writer": new_writer()}
    return _canonical({**content, "sha256": _digest(content)}) + b"\n"


def decode_record(data: bytes, key: str) -> dict[str, Any]:
    """The fields given to `encode_record`. Raise DamagedRecord, naming `key`, for anything else."""
    try:
        content = json.loads(data)
        digest = content.pop("sha256")
        intact = bool(digest == _digest(content))
        content.pop("writer")
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        raise DamagedRecord(f"Record {key} is not a complete record: {type(error).__name__} {error}.") from error
    if not intact:
        raise DamagedRecord(f"Record {key} does not match its own digest: it was altered after it was written.")
    return dict(content)


def write_record(store: ObjectStore, key: str, fields: Mapping[str, Any]) -> None:
    """Write once. Raise Fenced when another process wrote a record of this name, which only its one owner may do."""
    if not store.commit(key, encode_record(fields)):
        raise Fenced(f"Another process already wrote {key}: this one no longer owns the run and must stop.")


def read_record(store: ObjectStore, key: str) -> dict[str, Any]:
    """Raise ObjectMissing or DamagedRecord."""
    return decode_record(store.get(key), key)


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(content)).hexdigest()
