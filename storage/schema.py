"""The Parquet schemas of shards, ledger and evaluations, and their encoding.

A file is one row group, zstd-1, with byte-stream-split and no dictionary on token ids and log-probs (the smallest of
the measured settings), and readable by any Parquet reader. Its key-value metadata holds one JSON object under
`forebay` with a digest of every column, and under `forebay.sha256` the digest of that object: page checksums alone do
not protect the footer. `decode` verifies both, so what it returns is what `encode` was given. Types of a column never
change without a new SCHEMA_VERSION; new columns are nullable.

Token columns hold no nulls and stay Arrow buffers; `list_views` gives NumPy views of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from storage.errors import DamagedShard, UnknownSchema

SCHEMA_VERSION = 1
METADATA_KEY = b"forebay"
METADATA_DIGEST_KEY = b"forebay.sha256"


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


def _list_of(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind, nullable=False))


USAGE = pa.struct(
    [
        _required("name", pa.string()),
        _required("calls", pa.int32()),
        _required("failures", pa.int32()),
        _required("seconds", pa.float64()),
    ]
)
VERSION_SPAN = pa.struct([_required(name, pa.int32()) for name in ("attempt", "version", "start", "end")])

SHARD = pa.schema(
    [
        _required("run_id", pa.string()),
        _required("attempt", pa.int32()),
        _required("lease", pa.int64()),
        _required("part", pa.int32()),
        _required("ordinal", pa.int64()),
        _required("group_id", pa.string()),
        _required("rollout", pa.int32()),
        _required("sequence", pa.int32()),
        _required("epoch", pa.int32()),
        _required("dataset_index", pa.int64()),
        _required("environment", pa.string()),
        _required("prompt_length", pa.int32()),
        _required("token_ids", _list_of(pa.int32())),
        _required("loss_mask", _list_of(pa.bool_())),
        _required("logprobs", _list_of(pa.float32())),
        _required("version_spans", _list_of(VERSION_SPAN)),
        pa.field("min_version", pa.int32()),
        pa.field("max_version", pa.int32()),
        _required("engine", pa.string()),
        pa.field("reward", pa.float32()),
        pa.field("reward_components", pa.map_(pa.string(), pa.float32())),
        _required("finish_reason", pa.string()),
        _required("status", pa.string()),
        pa.field("error", pa.string()),
        pa.field("temperature", pa.float32()),
        pa.field("top_p", pa.float32()),
        pa.field("top_k", pa.int32()),
        pa.field("min_p", pa.float32()),
        pa.field("seed", pa.int64()),
        pa.field("max_tokens", pa.int32()),
        _required("messages", pa.string()),
        _required("turns", pa.int32()),
        _required("tool_calls", pa.int32()),
        _required("tool_failures", pa.int32()),
        pa.field("submitted_at", pa.float64()),
        pa.field("first_token_at", pa.float64()),
        pa.field("finished_at", pa.float64()),
        pa.field("tool_seconds", pa.float64()),
        pa.field("joins_clean", pa.int32()),
        pa.field("joins_realign", pa.int32()),
        pa.field("joins_fork", pa.int32()),
        pa.field("drift_tokens", pa.int32()),
        pa.field("drift_max", pa.int32()),
        pa.field("tool_rounds", pa.int32()),
        pa.field("unknown_tool_calls", pa.int32()),
        pa.field("malformed_tool_calls", pa.int32()),
        pa.field("tool_usage", _list_of(USAGE)),
        pa.field("environment_usage", _list_of(USAGE)),
        # Of the whole group, the same in each of its rows.
        pa.field("failed_requests", pa.int32()),
        pa.field("aborted_requests", pa.int32()),
        pa.field("discarded_tokens", pa.int64()),
        pa.field("scoring_wait_seconds", pa.float64()),
        pa.field("scoring_seconds", pa.float64()),
    ]
)

LEDGER = pa.schema(
    [
        _required("attempt", pa.int32()),
        _required("step", pa.int64()),
        _required("ordinal", pa.int64()),
        _required("state", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("lease_attempt", pa.int32()),
        pa.field("lease", pa.int64()),
        pa.field("part", pa.int32()),
        pa.field("version_min", pa.int32()),
        pa.field("version_max", pa.int32()),
        pa.field("lag_mean", pa.float32()),
        pa.field("lag_max", pa.int32()),
        pa.field("reward_mean", pa.float32()),
        pa.field("rewards", pa.list_(pa.field("element", pa.float32()))),
        pa.field("advantages", pa.list_(pa.field("element", pa.float32()))),
        pa.field("tokens_generated", pa.int64()),
        pa.field("tokens_trained", pa.int64()),
        pa.field("tokens_masked", pa.int64()),
        pa.field("trainer_logprobs", pa.list_(pa.field("element", _list_of(pa.float32())))),
        pa.field("dataset_index", pa.int64()),
        pa.field("epoch", pa.int32()),
    ]
)

METRICS = pa.schema(
    [
        _required("attempt", pa.int32()),
        _required("step", pa.int64()),
        _required("version", pa.int64()),
        pa.field("at", pa.float64()),
        _required("name", pa.string()),
        _required("value", pa.float64()),
    ]
)

PROMPTS = pa.schema([_required("messages", pa.string()), _required("columns", pa.string())])

EVALUATION = pa.schema(
    [
        _required("version", pa.int32()),
        pa.field("due_version", pa.int32()),
        _required("dataset_index", pa.int64()),
        _required("mode", pa.string()),
        pa.field("reward", pa.float32()),
        _required("prompt", pa.string()),
        _required("completion", pa.string()),
        _required("tokens", pa.int32()),
        _required("finish_reason", pa.string()),
        pa.field("min_version", pa.int32()),
        pa.field("max_version", pa.int32()),
        pa.field("version_tokens", pa.int32()),
    ]
)


class ListViews(NamedTuple):
    """List i is `values[offsets[i]:offsets[i + 1]]`; `offsets` is int64 [lists + 1] and begins with 0."""

    offsets: NDArray[np.int64]
    values: NDArray[np.generic]


def table(rows: Iterable[Mapping[str, object]], schema: pa.Schema) -> pa.Table:
    """Rows as dicts; a missing key is null. Raise ValueError for a key the schema lacks or a null it forbids."""
    rows = [dict(row) for row in rows]
    unknown = sorted({key for row in rows for key in row} - set(schema.names))
    if unknown:
        raise ValueError(f"Row holds the unknown column {unknown[0]!r}: the schema has {', '.join(schema.names)}.")
    return _conforming(pa.Table.from_pylist(rows, schema=schema), schema)


def encode(table: pa.Table, schema: pa.Schema, metadata: Mapping[str, str]) -> bytes:
    """One whole Parquet file. Raise ValueError when `table` does not fit `schema` or breaks its null rules."""
    table = _conforming(table, schema)
    digests = {name: _column_digest(table.column(name)) for name in schema.names}
    content = {**metadata, "schema_version": str(SCHEMA_VERSION), "column_digests": digests}
    described = json.dumps(content, sort_keys=True).encode()
    footer = {METADATA_KEY: described, METADATA_DIGEST_KEY: hashlib.sha256(described).hexdigest().encode()}
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.replace_schema_metadata(footer),
        sink,
        compression="zstd",
        compression_level=1,
        use_dictionary=[field.name for field in schema if pa.types.is_string(field.type)],
        column_encoding={path: "BYTE_STREAM_SPLIT" for path in _split_columns(schema)},
        row_group_size=max(1, table.num_rows),
        write_page_checksum=True,
    )
    return bytes(sink.getvalue())


def decode(
    data: bytes, columns: Sequence[str] | None = None, *, name: str = "shard"
) -> tuple[pa.Table, dict[str, str]]:
    """Table and metadata of `encode`, all columns or the given ones, each verified against its digest.

    Raise DamagedShard, naming the object `name`, for truncated or altered bytes; UnknownSchema for a newer schema.
    """
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        metadata, digests = _metadata(file.metadata.metadata, name)
        loaded = file.read(columns=None if columns is None else list(columns), use_threads=False)
        loaded.validate(full=True)
        intact = all(_column_digest(loaded.column(column)) == digests.get(column) for column in loaded.column_names)
    except (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
        raise DamagedShard(f"Parquet object {name} is truncated or altered: {_first_line(error)}.") from error
    wanted = set(digests) if columns is None else set(columns)
    if not intact or set(loaded.column_names) != wanted:
        raise DamagedShard(f"Parquet object {name} was altered: its columns do not match the digests in its footer.")
    return loaded.replace_schema_metadata(None), metadata


def decode_metadata(tail: bytes, *, name: str = "shard") -> dict[str, str] | None:
    """The metadata from the last bytes of a file; None when `tail` is too short to hold the whole footer."""
    if len(tail) < 8 or tail[-4:] != b"PAR1":
        raise DamagedShard(f"Parquet object {name} is truncated: it does not end with the Parquet mark.")
    if int.from_bytes(tail[-8:-4], "little") + 8 > len(tail):
        return None
    try:
        footer = pq.read_metadata(pa.BufferReader(tail)).metadata
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise DamagedShard(f"Parquet object {name} has a damaged footer: {_first_line(error)}.") from error
    return _metadata(footer, name)[0]


def list_views(column: pa.ChunkedArray | pa.Array) -> ListViews:
    """NumPy offsets and values of a list column without nulls; copies only if it has several chunks, or booleans.

    Correct on slices: offsets of a sliced list array point into values that it no longer shows.
    """
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    if any(chunk.null_count for chunk in chunks):
        raise ValueError("A list column with null lists has no offsets of its own: fill or drop the nulls first.")
    values = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in chunks]
    offsets = [np.zeros(1, np.int64)]
    for chunk in chunks:
        ends = chunk.offsets.to_numpy().astype(np.int64)
        offsets.append(ends[1:] - ends[0] + offsets[-1][-1])
    if len(values) == 1:
        return ListViews(np.concatenate(offsets), values[0])
    empty = np.zeros(0, column.type.value_type.to_pandas_dtype())
    return ListViews(np.concatenate(offsets), np.concatenate(values) if values else empty)


def _conforming(table: pa.Table, schema: pa.Schema) -> pa.Table:
    missing = [name for name in schema.names if name not in table.column_names]
    if missing:
        raise ValueError(f"Table lacks the column {missing[0]!r}: it must have every column of the schema.")
    table = table.select(schema.names).cast(schema)
    for field in schema:
        column = table.column(field.name)
        if not field.nullable and column.null_count:
            raise ValueError(
                f"Column {field.name!r} holds {column.null_count} nulls: it must have a value in each row."
            )
        if pa.types.is_list(field.type) and not field.type.value_field.nullable and pc.list_flatten(column).null_count:
            raise ValueError(f"Column {field.name!r} holds a null inside a list: every element must have a value.")
    return table


def _split_columns(schema: pa.Schema) -> list[str]:
    wanted = {"token_ids": "token_ids.list.element", "logprobs": "logprobs.list.element"}
    wanted["trainer_logprobs"] = "trainer_logprobs.list.element.list.element"
    return [path for name, path in wanted.items() if name in schema.names]


def _metadata(footer: Mapping[bytes, bytes] | None, name: str) -> tuple[dict[str, str], dict[str, str]]:
    described = (footer or {}).get(METADATA_KEY)
    if described is None:
        raise DamagedShard(f"Parquet object {name} carries no forebay metadata: it was not written by this program.")
    if hashlib.sha256(described).hexdigest().encode() != (footer or {}).get(METADATA_DIGEST_KEY):
        raise DamagedShard(f"Parquet object {name} was altered: its metadata does not match its own digest.")
    content = json.loads(described)
    if int(content["schema_version"]) > SCHEMA_VERSION:
        raise UnknownSchema(
            f"Parquet object {name} has schema version {content['schema_version']}, newer than {SCHEMA_VERSION}: "
            "read it with the version of the program that wrote it."
        )
    digests = content.pop("column_digests")
    return content, digests


def _column_digest(column: pa.ChunkedArray) -> str:
    """128 bits over types, lengths, nulls and values, whatever the chunks, slices or unused bytes behind them."""
    digest = hashlib.sha256()
    _feed(digest.update, column.combine_chunks() if column.num_chunks != 1 else column.chunk(0))
    return digest.hexdigest()[:32]


def _feed(update: Callable[[bytes], None], array: pa.Array) -> None:
    """Nested types go in by their shape and the names in a struct, not their full description, in which readers name
    the elements of lists anew."""
    update(f"{str(array.type).partition('<')[0]} {len(array)} {array.null_count};".encode())
    if array.null_count:
        update(np.packbits(array.is_valid().to_numpy(zero_copy_only=False)).tobytes())
    kind = array.type
    if pa.types.is_struct(kind):
        update(f"{[child.name for child in kind]};".encode())
        for child in array.flatten():
            _feed(update, child)
    elif pa.types.is_list(kind):
        update(_lengths(pc.list_value_length(array)))
        _feed(update, array.flatten())
    elif pa.types.is_map(kind):
        entries = pa.array(array.to_pylist(), pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)])))
        _feed(update, entries)
    elif pa.types.is_string(kind):
        update(_lengths(pc.binary_length(array)))
        update("".join(text for text in array.to_pylist() if text is not None).encode())
    elif pa.types.is_boolean(kind):
        update(np.packbits(pc.fill_null(array, False).to_numpy(zero_copy_only=False)).tobytes())
    else:
        update(pc.fill_null(array, 0).to_numpy().tobytes())


def _lengths(lengths: pa.Array) -> bytes:
    return bytes(pc.fill_null(lengths, 0).to_numpy().astype(np.int64).tobytes())


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
