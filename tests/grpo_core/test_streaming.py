"""A stream is recorded ahead of its use and gives the same prompts for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_core.config import DataConfig
from grpo_core.prompts import DataError, load_splits
from grpo_core.streaming import StreamedPrompts
from storage import layout
from storage.objects import ObjectStore

opened: list[int] = []
gate = threading.Event()


def numbers(*, skip: int, count: int = 1_000_000, label: str = "n") -> Iterator[dict[str, Any]]:
    opened.append(skip)
    return ({"prompt": f"{label}{number}", "answer": number} for number in range(skip, count))


def failing(*, skip: int) -> Iterator[dict[str, Any]]:
    yield from numbers(skip=skip, count=5)
    raise OSError("the connection was closed")


def leaving(*, skip: int) -> Iterator[dict[str, Any]]:
    yield from numbers(skip=skip, count=5)
    raise SystemExit(3)


def refilled(*, skip: int) -> Iterator[dict[str, Any]]:
    record: dict[str, Any] = {"prompt": [{"role": "user", "content": ""}], "tags": []}
    for number in range(skip, 9):
        record["prompt"][0]["content"] = f"n{number}"
        record["tags"][:] = [number]
        yield record


def slow(*, skip: int) -> Iterator[dict[str, Any]]:
    gate.wait(30)
    yield from numbers(skip=skip)


def wrong(*, skip: int) -> Iterator[Any]:
    yield {"question": "no prompt column"}


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    opened.clear()
    gate.clear()
    return ObjectStore.open(str(tmp_path / "run"))


def data(function: str = "numbers", *, shuffle: bool = True, **arguments: Any) -> DataConfig:
    source = {"kind": "stream", "function": f"{__name__}:{function}", "arguments": arguments, "chunk_size": 4}
    return DataConfig.model_validate({"source": source, "shuffle": shuffle, "seed": 3})


def stream(store: ObjectStore, config: DataConfig) -> StreamedPrompts:
    return StreamedPrompts(store, config, config.source)  # type: ignore[arg-type]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def texts(prompts: StreamedPrompts, ordinals: range) -> list[str]:
    return [prompts.prompt(ordinal).messages[-1]["content"] for ordinal in ordinals]


def test_only_what_is_asked_for_is_recorded_and_whole_chunks_of_it(store: ObjectStore) -> None:
    with stream(store, data()) as prompts:
        assert prompts.recorded(0) == 0
        prompts.recorded(6)
        until(lambda: prompts.recorded(0) == 8)
        assert texts(prompts, range(8)) == [f"n{number}" for number in range(8)]
        assert prompts.prompt(5).columns == {"answer": 5}
        assert prompts.prompt(5).dataset_index == 5


def test_a_resume_reads_the_record_and_asks_for_what_comes_after_it(store: ObjectStore) -> None:
    with stream(store, data()) as prompts:
        prompts.recorded(6)
        until(lambda: prompts.recorded(0) == 8)
    changed = data(label="other")
    with stream(store, changed) as again:
        assert texts(again, range(8)) == [f"n{number}" for number in range(8)], "what was recorded holds"
        again.recorded(10)
        until(lambda: again.recorded(0) == 12)
        assert texts(again, range(8, 12)) == [f"other{number}" for number in range(8, 12)]
    assert opened == [0, 8]


@pytest.mark.parametrize("count", [0, 4, 6])
def test_the_end_of_the_stream_makes_it_a_dataset(store: ObjectStore, count: int) -> None:
    with stream(store, data(count=count)) as prompts:
        prompts.recorded(100)
        until(lambda: prompts.recorded(0) is None)
        assert prompts.size == count
    with stream(store, data(count=count)) as again:
        assert again.size == count and again.recorded(100) is None
    assert opened == [0], "a stream that has ended is not opened again"


def test_further_epochs_are_permutations_of_the_record(store: ObjectStore) -> None:
    with stream(store, data(count=6)) as prompts:
        prompts.recorded(100)
        until(lambda: prompts.size == 6)
        first, second, third = (texts(prompts, range(6 * epoch, 6 * epoch + 6)) for epoch in range(3))
        assert first == [f"n{number}" for number in range(6)]
        assert sorted(second) == sorted(third) == first
        assert prompts.prompt(7).epoch == 1
    assert len({tuple(first), tuple(second), tuple(third)}) == 3
    with stream(store, data(count=6, shuffle=False)) as in_order:
        assert texts(in_order, range(6, 12)) == first


def test_an_end_that_was_not_recorded_any_more_is_recorded_by_the_next(store: ObjectStore) -> None:
    with stream(store, data(count=6)) as prompts:
        prompts.recorded(100)
        until(lambda: prompts.size == 6)
    store.delete(layout.prompt_log_end())
    with stream(store, data(count=6)) as again:
        until(lambda: again.size == 6)


def test_two_recorders_at_once_come_to_one_record(store: ObjectStore) -> None:
    with stream(store, data(label="a")) as one, stream(store, data(label="b")) as other:
        one.recorded(40)
        other.recorded(40)
        until(lambda: one.recorded(0) == 40 and other.recorded(0) == 40)
        assert texts(one, range(40)) == texts(other, range(40))


def test_a_slow_source_holds_up_nobody_who_asks(store: ObjectStore) -> None:
    with stream(store, data("slow")) as prompts:
        assert prompts.recorded(4) == 0
        gate.set()
        until(lambda: prompts.recorded(4) == 4)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("failing", "failed at record 5: OSError: the connection was closed"),
        ("leaving", "failed at record 5: SystemExit: 3"),
        ("missing", "cannot be opened after 0 records: AttributeError"),
        ("wrong", "record 0 is .*no prompt column.*yield dicts with the column 'prompt'"),
    ],
)
def test_a_function_that_fails_is_named_to_whoever_asks_next(store: ObjectStore, function: str, words: str) -> None:
    with stream(store, data(function)) as prompts, pytest.raises(DataError, match=words):
        until(lambda: prompts.recorded(100) is None)


def test_a_record_that_is_filled_again_and_again_is_a_prompt_each_time(store: ObjectStore) -> None:
    with stream(store, data("refilled", shuffle=False)) as prompts:
        until(lambda: prompts.recorded(9) is None)
        found = [prompts.prompt(ordinal) for ordinal in range(9)]
    assert [prompt.messages[0]["content"] for prompt in found] == [f"n{number}" for number in range(9)]
    assert [prompt.columns["tags"] for prompt in found] == [[number] for number in range(9)]


def test_the_system_prompt_begins_every_conversation(store: ObjectStore) -> None:
    config = data().model_copy(update={"system_prompt": "Be brief."})
    with stream(store, config) as prompts:
        prompts.recorded(1)
        until(lambda: prompts.recorded(0) == 4)
        assert [message["role"] for message in prompts.prompt(0).messages] == ["system", "user"]


def test_a_stream_shows_a_sample_and_has_no_size(store: ObjectStore) -> None:
    splits = load_splits(data(count=9))
    assert [row.messages[0]["content"] for row in splits.train] == ["n0", "n1", "n2", "n3"]
    assert splits.prompts is None
    assert splits.digest() == load_splits(data(count=9)).digest() != load_splits(data(count=8)).digest()
