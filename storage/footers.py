"""What a Parquet object says about itself, read from its end without the rest."""

from __future__ import annotations

from storage import schema
from storage.errors import DamagedShard
from storage.objects import ObjectStore

# Holds nearly every footer; a longer one costs a second request.
TAIL_BYTES = 64 * 1024


def read_metadata(store: ObjectStore, key: str) -> dict[str, str]:
    """The metadata that `schema.encode` was given. Raise ObjectMissing or DamagedShard."""
    metadata = schema.decode_metadata(store.get_tail(key, TAIL_BYTES), name=key)
    if metadata is None:
        metadata = schema.decode_metadata(store.get(key), name=key)
    if metadata is None:
        raise DamagedShard(f"Parquet object {key} is truncated: its footer is longer than the file.")
    return metadata
