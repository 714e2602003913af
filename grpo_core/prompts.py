"""The prompt stream: `prompt(ordinal)` is a pure function of the dataset, the seed and the ordinal.

Invariant: dataset[permutation(seed, epoch)[ordinal mod n]], computed and never replayed, so any ordinal can be
generated again at any time by any process. The held-out split shares no question with the train split.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from grpo_core.config import DataConfig, FileData, ReasoningGymData, StreamData
from grpo_core.trajectory import Prompt


class DataError(ValueError):
    """A dataset that cannot be used; the message names the source and what to do."""


@dataclass(frozen=True, slots=True)
class Row:
    """One dataset entry: the conversation to continue and what the reward functions get beside it."""

    messages: list[dict[str, Any]]
    columns: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Splits:
    """The two halves of a dataset, disjoint by question. `stream`: what the train split is drawn from when its end is
    not known; `train` is then but a sample from its beginning."""

    train: list[Row]
    held_out: list[Row]
    stream: str | None = None

    @property
    def prompts(self) -> int | None:
        """The size of the train split; None for a stream."""
        return len(self.train) if self.stream is None else None

    def digest(self) -> str:
        """Content key: a continued run must see the same prompts. Those of a stream are kept by its record."""
        train: list[Row] | str = self.train if self.stream is None else self.stream
        if isinstance(train, str):
            return hashlib.sha256(f"{train}{Splits([], self.held_out).digest()}".encode()).hexdigest()
        rows = [[row.messages, row.columns] for split in (train, self.held_out) for row in split]
        return hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode()).hexdigest()


class Prompts(Protocol):
    """The endless stream of prompts over the epochs of one dataset."""

    @property
    def size(self) -> int | None:
        """Prompts of one epoch; None while that is not known."""

    def prompt(self, ordinal: int) -> Prompt:
        """The prompt at `ordinal` ≥ 0."""

    def recorded(self, wanted: int) -> int | None:
        """The first ordinal that cannot be had yet, None when all can; those below `wanted` will soon be needed."""


class PromptStream:
    """The prompts of a dataset that is there as a whole."""

    def __init__(self, rows: Sequence[Row], *, seed: int, shuffle: bool = True) -> None:
        if not rows:
            raise DataError("the train split is empty; give data.source at least one prompt")
        self.rows = rows
        self._seed = seed
        self._shuffle = shuffle

    @property
    def size(self) -> int:
        return len(self.rows)

    def recorded(self, wanted: int) -> None:
        """All can be had."""

    def prompt(self, ordinal: int) -> Prompt:
        """The prompt at `ordinal` ≥ 0."""
        epoch, position = divmod(ordinal, len(self.rows))
        index = permuted(position, len(self.rows), seed=self._seed, epoch=epoch) if self._shuffle else position
        row = self.rows[index]
        return Prompt(ordinal=ordinal, epoch=epoch, dataset_index=index, messages=row.messages, columns=row.columns)


def permuted(position: int, size: int, *, seed: int, epoch: int) -> int:
    """Where `position` of an epoch lies in the dataset."""
    return int(_permutation(seed, epoch, size)[position])


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(size)


def load_splits(config: DataConfig) -> Splits:
    """Read or make both splits. Raise DataError."""
    match config.source:
        case ReasoningGymData() as source:
            train = _reasoning_gym(source, source.seed, source.size, skip=frozenset())
            questions = frozenset(row.columns["question"] for row in train)
            held_out = _reasoning_gym(source, source.held_out_seed, source.held_out_size, skip=questions)
            splits = Splits(train, held_out)
        case FileData() as source:
            held_out = _file_rows(source, source.held_out_path) if source.held_out_path else []
            splits = Splits(_file_rows(source, source.path), held_out)
            _check_disjoint(splits, source)
        case StreamData() as source:
            held_out = _file_rows(source, source.held_out_path) if source.held_out_path else []
            sample = list(islice(stream_rows(source, skip=0), source.chunk_size))
            splits = Splits(sample, held_out, stream=source.model_dump_json())
    train, held_out = ([with_system_prompt(row, config) for row in split] for split in (splits.train, splits.held_out))
    return Splits(train, held_out, splits.stream)


def with_system_prompt(row: Row, config: DataConfig) -> Row:
    """The row as the recipe wants it to begin."""
    if config.system_prompt is None:
        return row
    return Row([{"role": "system", "content": config.system_prompt}, *row.messages], row.columns)


def _reasoning_gym(source: ReasoningGymData, seed: int, size: int, *, skip: frozenset[str]) -> list[Row]:
    """`size` different questions of the task, none of them in `skip`."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise DataError(
            f"data.source.kind=reasoning_gym needs the package reasoning-gym ({error}); install it with `pip install 'forebay[tasks]'`"
        ) from error
    # A small task runs out of different questions; ten times as many draws as asked for is where we say so.
    try:
        entries = reasoning_gym.create_dataset(source.task, size=10 * size, seed=seed, **source.task_config)
    except (ValueError, TypeError, AssertionError) as error:
        raise DataError(
            f"data.source.task={source.task!r} cannot be made by reasoning-gym: {error}; check task and task_config"
        ) from error
    rows: list[Row] = []
    seen = set(skip)
    for entry in _entries(entries):
        if entry["question"] in seen:
            continue
        seen.add(entry["question"])
        columns = {
            "question": entry["question"],
            "answer": str(entry["answer"]),
            "entry": json.dumps(entry, default=str),
        }
        rows.append(Row([{"role": "user", "content": entry["question"]}], {**columns, "task": source.task}))
        if len(rows) == size:
            return rows
    raise DataError(
        f"data.source.task={source.task!r} has only {len(rows)} different questions outside the other split for seed {seed}, {size} are asked for; "
        "lower size or held_out_size, or widen task_config"
    )


def _entries(dataset: Any) -> Iterable[dict[str, Any]]:
    return (dataset[index] for index in range(len(dataset)))


def stream_rows(source: StreamData, *, skip: int) -> Iterator[Row]:
    """The rows of the stream after the first `skip`. Raise DataError."""
    where = f"data.source.function={source.function}"
    module, _, attribute = source.function.partition(":")
    try:
        records = iter(getattr(importlib.import_module(module), attribute)(skip=skip, **source.arguments))
    except (Exception, SystemExit) as error:
        raise DataError(f"{where} cannot be opened after {skip} records: {type(error).__name__}: {error}") from error
    number = skip
    while True:
        try:
            # A function may fill one record again and again.
            record: Any = copy.deepcopy(next(records, None))
        except (Exception, SystemExit) as error:
            raise DataError(f"{where} failed at record {number}: {type(error).__name__}: {error}") from error
        if record is None:
            return
        if not isinstance(record, dict) or source.prompt_column not in record:
            raise DataError(
                f"{where}, record {number} is {str(record)[:80]!r}; yield dicts with the column {source.prompt_column!r}"
            )
        yield record_row(record, source.prompt_column, f"{where}, record {number}")
        number += 1


def _check_disjoint(splits: Splits, source: FileData) -> None:
    trained = {json.dumps(row.messages, sort_keys=True) for row in splits.train}
    for number, row in enumerate(splits.held_out):
        if json.dumps(row.messages, sort_keys=True) in trained:
            raise DataError(
                f"data file {source.held_out_path}, row {number}: its prompt is also in {source.path}; remove it from one of them"
            )


def _file_rows(source: FileData | StreamData, path: Path) -> list[Row]:
    try:
        records = _parquet_records(path) if path.suffix == ".parquet" else _json_records(path)
    except (OSError, ValueError) as error:
        raise DataError(f"data file {path} cannot be read: {error}; give JSON Lines or Parquet") from error
    columns = list(dict.fromkeys(column for record in records for column in record))
    if records and source.prompt_column not in columns:
        raise DataError(
            f"data file {path} has no column {source.prompt_column!r}; its columns are {', '.join(columns)}"
        )
    # Reward functions get every column for every row.
    whole = ({column: record.get(column) for column in columns} for record in records)
    return [
        record_row(record, source.prompt_column, f"data file {path}, row {number}")
        for number, record in enumerate(whole)
    ]


def _parquet_records(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path).to_pylist()


def _json_records(path: Path) -> list[dict[str, Any]]:
    """Values exactly as written: no date is guessed from text, no key is added to a message."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    for number, record in enumerate(records):
        if not isinstance(record, dict):
            raise ValueError(f"row {number} is {record!r}, not an object")
    return records


def record_row(record: dict[str, Any], prompt_column: str, where: str) -> Row:
    """A record whose prompt is text or a conversation, as a row. Raise DataError, saying where."""
    prompt = record.pop(prompt_column)
    if isinstance(prompt, str) and prompt:
        messages = [{"role": "user", "content": prompt}]
    elif (
        isinstance(prompt, list)
        and prompt
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)
    ):
        messages = prompt
    else:
        raise DataError(f"{where}: {prompt_column} is {prompt!r}; give text or a list of role/content messages")
    return Row(messages, record)
