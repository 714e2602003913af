"""The prompt stream is a pure function, and the splits share nothing."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.config import DataConfig, FileData, ReasoningGymData
from grpo_core.prompts import DataError, PromptStream, Row, load_splits

ROWS = [Row([{"role": "user", "content": str(number)}], {"answer": str(number)}) for number in range(7)]


@given(st.lists(st.integers(0, 60), min_size=1), st.integers(0, 5))
def test_a_prompt_depends_on_its_ordinal_alone(ordinals: list[int], seed: int) -> None:
    fresh = {ordinal: PromptStream(ROWS, seed=seed).prompt(ordinal) for ordinal in set(ordinals)}
    stream = PromptStream(ROWS, seed=seed)
    assert [stream.prompt(ordinal) for ordinal in ordinals] == [fresh[ordinal] for ordinal in ordinals]


def test_each_epoch_holds_every_row_once_in_its_own_order() -> None:
    stream = PromptStream(ROWS, seed=3)
    epochs = [[stream.prompt(7 * epoch + place) for place in range(7)] for epoch in range(4)]
    orders = [tuple(prompt.dataset_index for prompt in epoch) for epoch in epochs]
    assert all(sorted(order) == list(range(7)) for order in orders)
    assert len(set(orders)) == 4
    assert [{prompt.epoch for prompt in epoch} for epoch in epochs] == [{0}, {1}, {2}, {3}]


def test_another_seed_gives_another_order() -> None:
    orders = {tuple(PromptStream(ROWS, seed=seed).prompt(i).dataset_index for i in range(7)) for seed in range(20)}
    assert len(orders) > 10


def test_the_order_does_not_touch_the_global_random_state() -> None:
    random.seed(1)
    before = random.getstate()
    PromptStream(ROWS, seed=0).prompt(100)
    assert random.getstate() == before


def test_without_shuffling_rows_come_in_their_own_order() -> None:
    stream = PromptStream(ROWS, seed=0, shuffle=False)
    assert [stream.prompt(ordinal).dataset_index for ordinal in range(9)] == [0, 1, 2, 3, 4, 5, 6, 0, 1]


def test_an_empty_split_is_refused() -> None:
    with pytest.raises(DataError, match="empty"):
        PromptStream([], seed=0)


def test_reasoning_gym_splits_share_no_question_and_repeat_none() -> None:
    task = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    source = ReasoningGymData(task_config=task, size=60, held_out_size=20, seed=1, held_out_seed=5)
    splits = load_splits(DataConfig(source=source))
    train, held_out = ({row.columns["question"] for row in split} for split in (splits.train, splits.held_out))
    assert (len(train), len(held_out), len(train & held_out)) == (60, 20, 0)
    assert splits.digest() == load_splits(DataConfig(source=source)).digest()
    assert splits.digest() != load_splits(DataConfig(source=source.model_copy(update={"seed": 2}))).digest()
    row = splits.train[0]
    assert row.messages == [{"role": "user", "content": row.columns["question"]}]
    assert json.loads(row.columns["entry"])["answer"] == row.columns["answer"]


def test_a_task_with_too_few_questions_says_so() -> None:
    task = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    with pytest.raises(DataError, match="different questions"):
        load_splits(DataConfig(source=ReasoningGymData(task_config=task, size=500, held_out_size=1)))


def test_unknown_tasks_and_settings_are_refused_by_name() -> None:
    with pytest.raises(DataError, match="no_such_task"):
        load_splits(DataConfig(source=ReasoningGymData(task="no_such_task")))
    with pytest.raises(DataError, match="chain_sum"):
        load_splits(DataConfig(source=ReasoningGymData(task_config={"no_such_setting": 1})))


MESSAGES = [
    {"role": "user", "content": "hi"},
    {"role": "tool", "content": "12", "name": "clock"},
]


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        path.write_text("\n\n".join(json.dumps(record, ensure_ascii=False) for record in records) + "\n", "utf-8")
    return path


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet"])
def test_files_hold_plain_text_or_messages_and_columns(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, [{"q": "2 + 2?", "answer": "4"}, {"q": "3 + 3?", "answer": "6"}])
    splits = load_splits(DataConfig(source=FileData(path=path, prompt_column="q"), system_prompt="Be brief."))
    system = {"role": "system", "content": "Be brief."}
    assert splits.train[0].messages == [system, {"role": "user", "content": "2 + 2?"}]
    assert [row.columns for row in splits.train] == [{"answer": "4"}, {"answer": "6"}]
    assert splits.held_out == []
    chat = write(tmp_path / f"chat-{name}", [{"prompt": MESSAGES[:1]}, {"prompt": [{**MESSAGES[0], "content": "yo"}]}])
    assert load_splits(DataConfig(source=FileData(path=chat))).train[0].messages == MESSAGES[:1]


def test_json_values_come_back_exactly_as_written(tmp_path: Path) -> None:
    records = [
        {"prompt": MESSAGES, "when": "2024-05-01T00:00:00", "big": 2**60, "line": "a\u2028b"},
        {"prompt": "x", "when": "n/a", "big": 1.5, "line": None, "extra": {"k": [1]}},
    ]
    rows = load_splits(DataConfig(source=FileData(path=write(tmp_path / "d.jsonl", records)))).train
    assert rows[0].messages == MESSAGES
    assert rows[0].columns == {"when": "2024-05-01T00:00:00", "big": 2**60, "line": "a\u2028b", "extra": None}
    assert rows[1].columns == {"when": "n/a", "big": 1.5, "line": None, "extra": {"k": [1]}}


def test_a_held_out_prompt_that_is_trained_on_is_refused(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    held_out = write(tmp_path / "held_out.jsonl", [{"prompt": "c"}, {"prompt": "b"}])
    with pytest.raises(DataError, match=r"held_out\.jsonl, row 1"):
        load_splits(DataConfig(source=FileData(path=train, held_out_path=held_out)))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"question": "x"}\n', "no column 'prompt'; its columns are question"),
        ('{"prompt": ""}\n', "row 0"),
        ('{"prompt": "a"}\n{"prompt": []}\n', "row 1"),
        ('{"prompt": [{"role": "user"}]}\n', "row 0"),
        ('{"prompt": 3}\n', "row 0"),
        ('{"prompt": "a"}\n{"other": 1}\n', "row 1"),
        ("[1]\n", "not an object"),
        ("{broken\n", "cannot be read"),
    ],
)
def test_bad_files_are_refused_with_the_row(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match="bad.jsonl") as caught:
        load_splits(DataConfig(source=FileData(path=path)))
    assert words in str(caught.value)


def test_missing_and_damaged_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        load_splits(DataConfig(source=FileData(path=tmp_path / "none.jsonl")))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="cannot be read"):
        load_splits(DataConfig(source=FileData(path=tmp_path / "bad.parquet")))


def test_a_missing_reasoning_gym_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError, match=r"needs the package reasoning-gym .*forebay\[tasks\]"):
        load_splits(DataConfig(source=ReasoningGymData()))
