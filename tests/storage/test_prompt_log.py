"""The prompt log keeps what a stream yielded, in chunks that are written once."""

import pytest

from storage import layout
from storage.errors import DamagedShard, ObjectMissing
from storage.objects import ObjectStore
from storage.prompt_log import (
    Chunk,
    LoggedPrompt,
    end_log,
    logged_prompts,
    read_chunk,
    recorded_chunks,
    write_chunk,
)


def chunk(*texts: str, last: bool = False) -> Chunk:
    return Chunk(tuple(LoggedPrompt([{"role": "user", "content": t}], {"answer": t * 2}) for t in texts), last)


def test_a_chunk_is_read_back_as_it_was_written(store: ObjectStore) -> None:
    assert write_chunk(store, 0, chunk("één", "zwei\n", last=True))
    assert read_chunk(store, 0) == chunk("één", "zwei\n", last=True)


def test_a_chunk_is_written_once_and_the_loser_reads_the_winners(store: ObjectStore) -> None:
    assert write_chunk(store, 0, chunk("first"))
    assert not write_chunk(store, 0, chunk("second"))
    assert read_chunk(store, 0) == chunk("first")


def test_chunks_are_counted_across_directories(store: ObjectStore) -> None:
    assert recorded_chunks(store) == 0
    for number in (0, 999, 1000):
        write_chunk(store, number, chunk("x"))
    assert recorded_chunks(store) == 1001


def test_the_size_is_known_when_the_end_was_recorded(store: ObjectStore) -> None:
    write_chunk(store, 0, chunk("x", last=True))
    assert logged_prompts(store) is None
    end_log(store, 1)
    end_log(store, 1)
    assert logged_prompts(store) == 1
    assert recorded_chunks(store) == 1, "the record of the end is not taken for a chunk"


def test_a_missing_or_damaged_chunk_is_an_error(store: ObjectStore) -> None:
    with pytest.raises(ObjectMissing):
        read_chunk(store, 0)
    write_chunk(store, 0, chunk("x"))
    data = bytearray(store.get(layout.prompt_chunk(0)))
    data[len(data) // 2] ^= 0xFF
    store.put(layout.prompt_chunk(0), bytes(data))
    with pytest.raises(DamagedShard):
        read_chunk(store, 0)
