"""Prompts of a dataset without a known end: recorded ahead of their use, and from then on like any others.

A thread of its own reads the user's function and commits what it yields to the prompt log, so a slow source holds up
nobody but itself. `prompt` reads the log only; so a resumed run generates from the very prompts that were recorded, and
asks the function for those after them. When the stream ends, its length is known and further epochs are permutations of
the record, as for any dataset.

Invariant: an ordinal below `recorded` is durable, and stays what it is, whoever reads it and whenever.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from itertools import islice
from types import TracebackType

from grpo_core.config import DataConfig, StreamData
from grpo_core.prompts import DataError, Row, permuted, stream_rows, with_system_prompt
from grpo_core.trajectory import Prompt
from storage.objects import ObjectStore
from storage.prompt_log import Chunk, LoggedPrompt, end_log, logged_prompts, read_chunk, recorded_chunks, write_chunk

CACHED_CHUNKS = 64


class StreamedPrompts:
    """The prompt stream of a StreamData source. Its thread lives while this context is open. Thread-safe."""

    def __init__(self, store: ObjectStore, config: DataConfig, source: StreamData) -> None:
        self._store = store
        self._config = config
        self._source = source
        self._chunk = lru_cache(CACHED_CHUNKS)(lambda number: read_chunk(store, number))
        self._changed = threading.Condition()
        self._chunks = recorded_chunks(store)
        self._wanted = 0
        self._closed = False
        self._failure: DataError | None = None
        self.size = logged_prompts(store)

    def prompt(self, ordinal: int) -> Prompt:
        """The prompt at a recorded ordinal. Raise ObjectMissing for one that is not."""
        epoch, index = (0, ordinal) if self.size is None else divmod(ordinal, self.size)
        if self.size is not None and epoch > 0 and self._config.shuffle:
            index = permuted(index, self.size, seed=self._config.seed, epoch=epoch)
        number, place = divmod(index, self._source.chunk_size)
        logged = self._chunk(number).prompts[place]
        row = with_system_prompt(Row([dict(m) for m in logged.messages], dict(logged.columns)), self._config)
        return Prompt(ordinal=ordinal, epoch=epoch, dataset_index=index, messages=row.messages, columns=row.columns)

    def recorded(self, wanted: int) -> int | None:
        """The first ordinal that is not recorded yet, None once all are; asks for those below `wanted`. Raise DataError
        when the function failed."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            if self.size is not None:
                return None
            if wanted > self._wanted:
                self._wanted = wanted
                self._changed.notify()
            return self._chunks * self._source.chunk_size

    def __enter__(self) -> StreamedPrompts:
        if self._chunks > 0 and self.size is None and self._chunk(self._chunks - 1).last:
            self._end(self._chunks - 1)
        if self.size is None:
            threading.Thread(target=self._record, name="prompt-log", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _record(self) -> None:
        """Commit chunk after chunk, as far as they are asked for, until the stream ends or fails."""
        size = self._source.chunk_size
        try:
            rows = stream_rows(self._source, skip=self._chunks * size)
            while self._asked():
                prompts = tuple(LoggedPrompt(row.messages, row.columns) for row in islice(rows, size))
                # Whoever recorded this chunk before us recorded the same part of the stream.
                write_chunk(self._store, self._chunks, Chunk(prompts, last=len(prompts) < size))
                if self._chunk(self._chunks).last:
                    self._end(self._chunks)
                    return
                with self._changed:
                    self._chunks += 1
        except DataError as failure:
            with self._changed:
                self._failure = failure
        except BaseException as error:  # noqa: BLE001 - a thread has nobody above it; whoever asks next hears of it
            with self._changed:
                self._failure = DataError(f"the prompt log of {self._store.url} cannot be recorded or read: {error}")

    def _end(self, last: int) -> None:
        """The stream ends with chunk `last`. Its size is known at once, so that nobody counts on a whole chunk."""
        size = last * self._source.chunk_size + len(self._chunk(last).prompts)
        end_log(self._store, size)
        with self._changed:
            self._chunks, self.size = last + 1, size

    def _asked(self) -> bool:
        """Wait until prompts are wanted that are not recorded. False when we are to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._chunks * self._source.chunk_size < self._wanted)
            return not self._closed
