"""The prompt stream: `prompt(ordinal)` is a pure function of the dataset, the seed and the ordinal.

Invariant: dataset[permutation(seed, epoch)[ordinal mod n]], computed and never replayed, so any ordinal can be
generated again at any time by any process. The held-out split shares no question with the train split.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from grpo_core.config import DataConfig, FileData, ReasoningGymData
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
    """The two halves of a dataset, disjoint by question."""

    train: list[Row]
    held_out: list[Row]

    def digest(self) -> str:
        """Content key: a continued run must see the same prompts."""
        rows = [[row.messages, row.columns] for split in (self.train, self.held_out) for row in split]
        return hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode()).hexdigest()


class PromptStream:
    """The endless stream of prompts over the epochs of one dataset."""

    def __init__(self, rows: Sequence[Row], *, seed: int, shuffle: bool = True) -> None:
        if not rows:
            raise DataError("the train split is empty; give data.source at least one prompt")
        self.rows = rows
        self._seed = seed
        self._shuffle = shuffle

    def prompt(self, ordinal: int) -> Prompt:
        """The prompt at `ordinal` ≥ 0."""
        epoch, position = divmod(ordinal, len(self.rows))
        index = int(_permutation(self._seed, epoch, len(self.rows))[position]) if self._shuffle else position
        row = self.rows[index]
        return Prompt(ordinal=ordinal, epoch=epoch, dataset_index=index, messages=row.messages, columns=row.columns)


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
    if config.system_prompt is None:
        return splits
    system = {"role": "system", "content": config.system_prompt}
    with_system = [
        [Row([system, *row.messages], row.columns) for row in split] for split in (splits.train, splits.held_out)
    ]
    return Splits(*with_system)


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


def _check_disjoint(splits: Splits, source: FileData) -> None:
    trained = {json.dumps(row.messages, sort_keys=True) for row in splits.train}
    for number, row in enumerate(splits.held_out):
        if json.dumps(row.messages, sort_keys=True) in trained:
            raise DataError(
                f"data file {source.held_out_path}, row {number}: its prompt is also in {source.path}; remove it from one of them"
            )


def _file_rows(source: FileData, path: Path) -> list[Row]:
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
    return [_file_row(record, source.prompt_column, path, number) for number, record in enumerate(whole)]


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


def _file_row(record: dict[str, Any], prompt_column: str, path: Path, number: int) -> Row:
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
        raise DataError(
            f"data file {path}, row {number}: {prompt_column} is {prompt!r}; give text or a list of role/content messages"
        )
    return Row(messages, record)
