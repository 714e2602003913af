"""A lease's task: groups become parts as they finish, and what cannot be generated ends as a tombstone."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.generate import LeaseJob, LeaseStopped
from grpo_core.config import RunConfig
from grpo_core.prompts import PromptStream, Row
from grpo_core.rollout.concurrency import CallsHang
from grpo_core.rollout.group import Generator
from grpo_core.rollout.pool import NoEngine
from grpo_core.trajectory import Prompt
from storage.leases import LeaseRecord
from storage.objects import ObjectStore
from storage.trajectories import TrajectoryStore

STREAM = PromptStream([Row([{"role": "user", "content": "1 + 1 ="}], {})], seed=0)


class SlowForSome(Generator):
    """Groups without an engine: one row each; ordinal 2 takes longer than a flush."""

    async def group(self, prompt: Prompt, session: Any, *, attempt: int, lease: int) -> list[dict[str, Any]]:
        await asyncio.sleep(0.6 if prompt.ordinal == 2 else 0.0)
        return self.tombstone(prompt, "no engine in this test")


class RaisesForOne(Generator):
    """As if one answer met a fault of ours: ordinal 2 raises `error`, or leaves a task behind that does."""

    error: BaseException

    async def group(self, prompt: Prompt, session: Any, *, attempt: int, lease: int) -> list[dict[str, Any]]:
        if prompt.ordinal == 2 and isinstance(self.error, Exception):
            raise self.error
        if prompt.ordinal == 2:
            asyncio.get_running_loop().create_task(self._left_behind())
            await asyncio.sleep(60)
        return self.tombstone(prompt, "no engine in this test")

    async def _left_behind(self) -> None:
        raise self.error


def raising(tmp_path: Path, error: BaseException, **changes: Any) -> LeaseJob:
    generator = RaisesForOne(RunConfig(), SimpleNamespace(), SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    object.__setattr__(generator, "error", error)
    return job(tmp_path, lease(), generator=generator, **changes)


def job(tmp_path: Path, record: LeaseRecord, **changes: Any) -> LeaseJob:
    config = RunConfig.model_validate({"generation": {"flush_seconds": 0.2}})
    store = ObjectStore.open(str(tmp_path / "run"))
    generator = SlowForSome(config, SimpleNamespace(), SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    fields = {
        "record": record,
        "generator": generator,
        "stream": STREAM,
        "trajectories": TrajectoryStore(store, 1),
        "stopped": lambda: False,
        "on_tokens": lambda count: None,
        "warn": lambda message: None,
    }
    return LeaseJob(**{**fields, **changes})


def lease(**fields: Any) -> LeaseRecord:
    return LeaseRecord(attempt=1, lease=0, ordinals=(1, 2, 3), dispatched_at=0.0, stamp="1.0", **fields)


def test_a_straggler_holds_back_only_its_own_group(tmp_path: Path) -> None:
    work = job(tmp_path, lease())
    result = work.run()
    footers = [work.trajectories.read_footer(name) for name in work.trajectories.open_parts([0])]
    assert [footer.ordinals for footer in footers] == [(1, 3), (2,)]
    assert [footer.last for footer in footers] == [False, True]
    assert sorted(result.arrived) == [1, 2, 3] and sum(result.failures.values()) == 3


def test_a_prompt_that_cost_its_leases_too_often_is_not_generated_again(tmp_path: Path) -> None:
    work = job(tmp_path, lease(failure_counts={2: 3, 3: 2}))
    work.run()
    errors = dict(zip(*(_column(work, name) for name in ("ordinal", "error")), strict=True))
    assert "3 leases" in errors[2] and errors[3] == "no engine in this test"


def test_a_stopped_lease_leaves_what_it_had_committed(tmp_path: Path) -> None:
    began = time.monotonic()
    work = job(tmp_path, lease(), stopped=lambda: time.monotonic() - began > 0.35)
    with pytest.raises(LeaseStopped, match="lease 0"):
        work.run()
    assert all(not work.trajectories.read_footer(name).last for name in work.trajectories.open_parts([0]))


def test_what_nobody_foresaw_in_one_group_costs_that_group_alone_and_is_shown(tmp_path: Path) -> None:
    warnings: list[str] = []
    work = raising(tmp_path, TypeError("TextEncodeInput"), warn=warnings.append)
    assert sorted(work.run().arrived) == [1, 2, 3]
    errors = dict(zip(*(_column(work, name) for name in ("ordinal", "error")), strict=True))
    assert errors[2] == "TypeError: TextEncodeInput" and errors[3] == "no engine in this test"
    (warning,) = warnings
    assert "ordinal 2 failed unforeseen" in warning and "Traceback" in warning


@pytest.mark.parametrize("error", [NoEngine("none was admitted"), CallsHang("64 calls have not returned")])
def test_what_is_no_fault_of_a_prompt_ends_its_lease(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        raising(tmp_path, error).run()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_task_that_foreign_code_left_behind_ends_its_lease_and_not_the_flow(
    tmp_path: Path, error: BaseException
) -> None:
    with pytest.raises(RuntimeError, match=f"it raised {type(error).__name__}"):
        raising(tmp_path, error).run()


def _column(work: LeaseJob, name: str) -> list[Any]:
    return work.trajectories.read(work.trajectories.open_parts([0])).column(name).to_pylist()
