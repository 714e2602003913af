"""An evaluation asks each prompt equally often, says which versions answered, and is stored whole or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flows.evaluate import LATE, EvaluationJob, EvaluationLate, EvaluationStopped, portions
from grpo_core.config import EvaluationConfig, RunConfig
from grpo_core.evaluation import read_evaluation
from grpo_core.prompts import Row
from grpo_core.rollout.rewards import Scores
from grpo_core.rollout.turns import RolloutFailed, Task
from grpo_core.trajectory import Prompt, Rollout, Stamp, Turn, VersionSpan
from storage import layout, schema
from storage.attempts import claim_next
from storage.errors import Fenced
from storage.layout import EvaluationName
from storage.objects import ObjectStore

ROWS = [Row([{"role": "user", "content": str(number)}], {}) for number in range(3)]
LIVE = Stamp(1, 4)


@dataclass
class StubGenerator:
    """Answers with three tokens, the last of which the next version sampled; prompt 2 cannot be answered, and of prompt
    0 not more than `most` times; the rewards of prompt 1 raise `odd`, which nobody foresaw."""

    config: RunConfig
    before: Callable[[], None] = lambda: None
    seconds: float = 0.0
    hangs: int | None = None
    odd: Exception | None = None
    most: int = 99
    tasks: list[Task] = field(default_factory=list)

    async def rollouts(self, task: Task, count: int) -> list[Rollout | RolloutFailed]:
        self.tasks.append(task)
        self.before()
        await asyncio.sleep(60.0 if task.prompt.dataset_index == self.hangs else self.seconds)
        if task.prompt.dataset_index == 2:
            return [RolloutFailed("the engine said no")] * count
        spans = (VersionSpan(1, 4, 0, 2), VersionSpan(1, 5, 2, 3))
        turn = Turn([1], [7, 8, 9], [-1.0] * 3, spans, "stop")
        rollouts = [
            Rollout(index, [turn], [{"role": "assistant", "content": "a"}], "stop", 0) for index in range(count)
        ]
        most = self.most if task.prompt.dataset_index == 0 else count
        return [rollout if rollout.index < most else RolloutFailed("it was cut off") for rollout in rollouts]

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Scores:
        if prompt.dataset_index == 1 and self.odd is not None:
            raise self.odd
        return Scores({}, [1.0] + [0.0] * (len(rollouts) - 1))


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    store = ObjectStore.open(str(tmp_path / "run"))
    claim(store)
    return store


def claim(store: ObjectStore) -> None:
    claim_next(store, parent=None, host="h", pid=1, pid_started_at=1.0, claimed_at=1.0)


def job(
    store: ObjectStore,
    stopped: Callable[[], bool] = lambda: False,
    *,
    timeout: float = 60,
    warn: Callable[[str], None] = lambda message: None,
    **stub: Any,
) -> EvaluationJob:
    config = RunConfig(evaluation=EvaluationConfig(samples=6, samples_per_prompt=2, timeout_seconds=timeout))
    return EvaluationJob(StubGenerator(config, **stub), ROWS, store, LIVE, stopped, warn, due=3)  # type: ignore[arg-type]


def stored(store: ObjectStore) -> list[dict[str, Any]]:
    key = layout.evaluation(1, 4)
    return schema.decode(store.get(key), name=key)[0].to_pylist()


def counts(rows: int, **settings: Any) -> list[int]:
    wanted = portions(EvaluationConfig(**settings), rows)
    assert [portion.index for portion in wanted] == list(range(len(wanted)))
    return [portion.count for portion in wanted]


def test_samples_are_spread_over_the_prompts_or_given_to_as_many_as_they_suffice_for() -> None:
    assert counts(3, samples=8, greedy=False) == [3, 3, 2]
    assert counts(3, samples=2, greedy=False) == [1, 1]
    assert counts(3, samples=8, samples_per_prompt=4, greedy=False) == [4, 4]
    assert counts(3, samples=100, samples_per_prompt=4, greedy=False) == [4, 4, 4]
    both = portions(EvaluationConfig(samples=2, samples_per_prompt=1), 3)
    assert [(portion.mode, portion.index) for portion in both] == [
        ("sampled", 0), ("sampled", 1), ("greedy", 0), ("greedy", 1)
    ]  # fmt: skip


def test_each_completion_says_which_versions_it_is_of(store: ObjectStore) -> None:
    made = job(store)
    found = made.run()
    assert (found.attempt, found.version, found.purity) == (1, 4, pytest.approx(2 / 3))
    assert found.scores["sampled"].mean == 0.5 and found.scores["pass@2"].mean == 1.0
    assert found.metrics()["evaluation_purity"] == found.purity and found.metrics()["evaluation/pass@2"] == 1.0
    assert found.metrics()["evaluation_tokens_mean"] == 3.0
    assert found.seconds is not None and found.metrics()["evaluation_seconds"] == found.seconds
    kept = read_evaluation(store, EvaluationName(1, 4), made.generator.config)
    assert kept.metrics() == pytest.approx(found.metrics(), abs=1e-3)
    assert (found.due, found.unscored_prompts) == (3, 1)
    answered = [row for row in stored(store) if row["finish_reason"] == "stop"]
    assert {(row["min_version"], row["max_version"], row["version_tokens"]) for row in answered} == {(4, 5, 2)}
    assert {(row["version"], row["due_version"]) for row in stored(store)} == {(4, 3)}
    failed = [row for row in stored(store) if row["finish_reason"] == "error"]
    assert [(row["dataset_index"], row["mode"], row["reward"]) for row in failed] == [
        (2, "sampled", None), (2, "sampled", None), (2, "greedy", None)
    ]  # fmt: skip
    assert "the engine said no" in failed[0]["completion"]


def test_a_completion_that_failed_costs_its_prompt_no_other(store: ObjectStore) -> None:
    found = job(store, most=1).run()
    assert [(row["finish_reason"], row["reward"]) for row in stored(store) if row["dataset_index"] == 0] == [
        ("stop", 1.0), ("error", None), ("stop", 1.0)
    ]  # fmt: skip
    assert (found.scores["sampled"].samples, found.unscored_prompts) == (3, 2)


@pytest.mark.parametrize("odd", [TypeError("it is odd"), TimeoutError("it is odd")])
def test_what_nobody_foresaw_costs_one_prompt_and_is_shown(store: ObjectStore, odd: Exception) -> None:
    warnings: list[str] = []
    found = job(store, odd=odd, warn=warnings.append).run()
    assert (found.scores["sampled"].samples, found.unscored_prompts) == (2, 2)
    said = [(row["completion"], row["finish_reason"]) for row in stored(store) if row["dataset_index"] == 1]
    assert said == [(f"{type(odd).__name__}: it is odd", "error")] * 2
    assert len(warnings) == 2 and all("prompt 1 failed unforeseen" in text and "Traceback" in text for text in warnings)


def test_requests_of_an_evaluation_are_not_cut_off_for_their_age(store: ObjectStore) -> None:
    made = job(store)
    made.run()
    assert {task.cancellable for task in made.generator.tasks} == {False}  # type: ignore[attr-defined]


def test_what_is_not_finished_at_the_deadline_is_recorded_without_a_score(store: ObjectStore) -> None:
    found = job(store, timeout=0.5, hangs=1).run()
    late = [row for row in stored(store) if row["finish_reason"] == LATE]
    assert [(row["dataset_index"], row["mode"], row["reward"]) for row in late] == [
        (1, "sampled", None),
        (1, "greedy", None),
    ]
    assert "not finished within evaluation.timeout_seconds=0.5" in late[0]["completion"]
    assert (found.scores["sampled"].samples, found.unscored_prompts) == (2, 2)


def test_an_evaluation_of_which_nothing_is_finished_is_none(store: ObjectStore) -> None:
    with pytest.raises(EvaluationLate, match=r"version 4 was not finished within evaluation.timeout_seconds=0.1"):
        job(store, timeout=0.1, seconds=60.0).run()
    assert store.list(layout.evaluations_prefix(), recursive=True) == []


def test_a_stopped_evaluation_leaves_nothing(store: ObjectStore) -> None:
    with pytest.raises(EvaluationStopped, match="version 4"):
        job(store, lambda: True, seconds=60.0).run()
    assert store.list(layout.evaluations_prefix(), recursive=True) == []


def test_an_evaluation_that_a_newer_attempt_fenced_is_not_stored(store: ObjectStore) -> None:
    """The engines carry the newer attempt's weights by then."""
    claims = iter([lambda: claim(store)])
    with pytest.raises(Fenced):
        job(store, before=lambda: next(claims, lambda: None)()).run()
    assert store.list(layout.evaluations_prefix(), recursive=True) == []
