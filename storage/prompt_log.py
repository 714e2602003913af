"""The prompt log: what a streaming dataset yielded, recorded ahead of its use, so that it can be read again for ever.

Chunks are numbered from 0 without gaps and hold the same number of prompts each, except the last one, which is marked
`last` and may be empty. Chunk k is written once; whoever loses the race reads the winner's, and both go on from the
same position. When the stream has ended the record of its end follows, and the log is a dataset like any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from storage import layout, schema
from storage.errors import DamagedShard, ObjectMissing
from storage.objects import ObjectStore
from storage.records import encode_record, new_writer, read_record


@dataclass(frozen=True, slots=True)
class LoggedPrompt:
    """One entry: the conversation to continue, and the columns beside it."""

    messages: Sequence[Mapping[str, Any]]
    columns: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Chunk:
    """`last`: the dataset ended with these prompts."""

    prompts: tuple[LoggedPrompt, ...]
    last: bool


def write_chunk(store: ObjectStore, number: int, chunk: Chunk) -> bool:
    """Commit a chunk. False: somebody else already recorded this part of the stream."""
    rows = (
        {"messages": json.dumps(prompt.messages), "columns": json.dumps(prompt.columns, default=str)}
        for prompt in chunk.prompts
    )
    metadata = {"chunk": str(number), "last": json.dumps(chunk.last), "writer": new_writer()}
    data = schema.encode(schema.table(rows, schema.PROMPTS), schema.PROMPTS, metadata)
    return store.commit(layout.prompt_chunk(number), data)


def read_chunk(store: ObjectStore, number: int) -> Chunk:
    """Raise ObjectMissing or DamagedShard."""
    key = layout.prompt_chunk(number)
    table, metadata = schema.decode(store.get(key), name=key)
    try:
        prompts = tuple(
            LoggedPrompt(json.loads(row["messages"]), json.loads(row["columns"])) for row in table.to_pylist()
        )
        return Chunk(prompts, bool(json.loads(metadata["last"])))
    except (KeyError, ValueError, TypeError) as error:
        raise DamagedShard(
            f"Parquet object {key} is not a chunk of prompts: {type(error).__name__} {error}."
        ) from error


def recorded_chunks(store: ObjectStore) -> int:
    """How many chunks there are: the listing of the newest directory, whatever their number."""
    directories = store.directories(layout.prompt_log_prefix())
    if not directories:
        return 0
    numbers = (layout.parse_prompt_chunk(key) for key in store.list(directories[-1]))
    return 1 + max((number for number in numbers if number is not None), default=-1)


def end_log(store: ObjectStore, size: int) -> None:
    """Say that the dataset has `size` prompts; saying it twice changes nothing."""
    store.put_if_absent(layout.prompt_log_end(), encode_record({"prompts": size}))


def logged_prompts(store: ObjectStore) -> int | None:
    """The size of the dataset once the stream has ended; None while it goes on. One request."""
    try:
        return int(read_record(store, layout.prompt_log_end())["prompts"])
    except ObjectMissing:
        return None
