"""Evaluations go beside training, one at a time; none is forgotten by a jump of versions, an outage or a restart."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from flows.evaluate import EvaluationJob
from flows.evaluating import Evaluating
from grpo_core.config import RunConfig
from grpo_core.evaluation import Evaluation, Score, read_evaluations
from grpo_core.prompts import Row
from grpo_core.rollout.pool import NoEngine
from storage import layout, schema
from storage.attempts import claim_next
from storage.objects import ObjectStore

ROWS = [Row([{"role": "user", "content": "1 + 1 ="}], {})]


class StubControl:
    """Keeps what it was told; its evaluations end when the test says so."""

    def __init__(self) -> None:
        self.begun: list[tuple[EvaluationJob, Future[Evaluation]]] = []
        self.said: list[str] = []
        self.warned: list[str] = []

    def evaluate(self, job: EvaluationJob) -> Future[Evaluation]:
        self.begun.append((job, Future()))
        return self.begun[-1][1]

    def say(self, message: str) -> None:
        self.said.append(message)

    def warn(self, message: str) -> None:
        self.warned.append(message)

    @property
    def versions(self) -> list[int]:
        return [job.stamp.version for job, _ in self.begun]


class Stage:
    """The evaluations of one attempt after another, over one store."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.store = ObjectStore.open(str(directory))
        self.config = RunConfig.model_validate({"evaluation": {"every_steps": 2, **settings}})
        self.attempt = 0
        self.rows = ROWS
        self.published: list[Evaluation] = []

    def claim(self, parent: tuple[int, int] | None = None) -> Evaluating:
        self.attempt += 1
        claim_next(self.store, parent=parent, host="h", pid=1, pid_started_at=1.0, claimed_at=1.0)
        self.control = StubControl()
        return Evaluating(
            self.config,
            self.store,
            self.attempt,
            held_out=self.rows,
            generator=None,  # type: ignore[arg-type]
            control=self.control,  # type: ignore[arg-type]
            stopped=lambda: False,
            publish=self.published.append,
        )

    def end(self, reward: float = 0.0) -> None:
        """The newest evaluation has ended, and is in the store."""
        job, future = self.control.begun[-1]
        attempt, version = job.stamp.attempt, job.stamp.version
        row = {"version": version, "due_version": job.due, "dataset_index": 0, "mode": "greedy", "reward": reward}
        row |= {"prompt": "[]", "completion": "", "tokens": 1, "finish_reason": "stop"}
        data = schema.encode(schema.table([row], schema.EVALUATION), schema.EVALUATION, {})
        assert self.store.put_if_absent(layout.evaluation(attempt, version), data)
        future.set_result(Evaluation(attempt, version, version, {"greedy": Score(reward, 0.0, 1)}, 1.0))

    def evaluated(self) -> list[tuple[int, int | None]]:
        """Each evaluation of the living history: its version, and the first due version that it serves."""
        return [(each.version, each.due) for each in read_evaluations(self.store, self.config)]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path / "run")


def test_version_0_comes_before_the_first_lease_and_is_repeated_after_an_outage(stage: Stage) -> None:
    evaluating = stage.claim()
    assert evaluating.first(0, leased=False) and stage.control.versions == [0]
    stage.control.begun[0][1].set_exception(NoEngine("no engine"))
    assert evaluating.first(0, leased=False) and stage.control.versions == [0, 0]
    assert "version 0 begins again" in stage.control.warned[0]
    stage.end()
    assert not evaluating.first(0, leased=False)
    assert stage.control.versions == [0, 0] and evaluating.newest is not None
    again = stage.claim()
    assert not again.first(0, leased=False) and stage.control.versions == []


def test_training_is_not_kept_waiting_and_one_evaluation_is_under_way_at_most(stage: Stage) -> None:
    evaluating = stage.claim()
    for live in (1, 2, 3):
        evaluating.beside_training(live)
        assert not evaluating.first(live, leased=True)
    assert stage.control.versions == [2]
    stage.end()
    evaluating.beside_training(3)
    assert stage.control.versions == [2]
    evaluating.beside_training(4)
    assert stage.control.versions == [2, 4]


def test_a_jump_over_a_due_version_evaluates_what_is_live(stage: Stage) -> None:
    evaluating = stage.claim()
    evaluating.beside_training(3)
    stage.end()
    evaluating.beside_training(5)
    stage.end()
    assert stage.evaluated() == [(3, 2), (5, 4)]


def test_what_passed_during_an_evaluation_is_made_up_for_with_what_is_live_then(stage: Stage) -> None:
    evaluating = stage.claim()
    for live in (2, 4, 5, 6, 7):
        evaluating.beside_training(live)
    stage.end()
    evaluating.beside_training(7)
    stage.end()
    evaluating.beside_training(7)
    assert stage.evaluated() == [(2, 2), (7, 4)]


def test_an_outage_leaves_the_evaluation_due(stage: Stage) -> None:
    evaluating = stage.claim()
    evaluating.beside_training(2)
    stage.control.begun[0][1].set_exception(NoEngine("no engine"))
    evaluating.beside_training(3)
    assert stage.control.versions == [2, 3]


def test_an_evaluation_that_fails_ends_the_run(stage: Stage) -> None:
    evaluating = stage.claim()
    evaluating.beside_training(2)
    stage.control.begun[0][1].set_exception(OSError("disk"))
    with pytest.raises(OSError, match="disk"):
        evaluating.beside_training(2)


@pytest.mark.parametrize(
    ("parent", "due"), [(3, None), (4, 4), (5, 4), (7, 4)], ids=["not yet due", "still live", "later", "much later"]
)
def test_what_a_dead_attempt_owed_is_made_up_for(stage: Stage, parent: int, due: int | None) -> None:
    """Attempt 1 had evaluated version 2, and died in the evaluation of version 4."""
    evaluating = stage.claim()
    evaluating.beside_training(2)
    stage.end()
    evaluating.beside_training(4)
    resumed = stage.claim((1, parent))
    resumed.beside_training(parent)
    if due is None:
        assert stage.control.versions == []
        parent = due = 4
        resumed.beside_training(parent)
    stage.end()
    assert stage.evaluated() == [(2, 2), (parent, due)]


def test_an_evaluation_of_a_branch_that_was_cut_off_serves_nothing(stage: Stage) -> None:
    evaluating = stage.claim()
    for live in (2, 7):
        evaluating.beside_training(live)
        stage.end()
        evaluating.beside_training(live)
    assert stage.evaluated() == [(2, 2), (7, 4)]
    stage.claim((1, 5)).beside_training(5)
    stage.end()
    assert stage.evaluated() == [(2, 2), (5, 4)]


def test_the_last_version_waits_for_the_one_under_way(stage: Stage) -> None:
    evaluating = stage.claim()
    evaluating.beside_training(2)
    assert evaluating.last(3) and stage.control.versions == [2]
    stage.end()
    assert evaluating.last(3) and stage.control.versions == [2, 3]
    stage.end()
    assert not evaluating.last(3)
    assert stage.evaluated() == [(2, 2), (3, None)]


def test_a_due_last_version_is_evaluated_though_the_end_was_not_asked_for(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "run", at_end=False)
    evaluating = stage.claim()
    assert not evaluating.last(1)
    assert evaluating.last(2)
    stage.end()
    assert not evaluating.last(3)
    assert evaluating.last(5)
    stage.end()
    assert stage.evaluated() == [(2, 2), (5, 4)]


def test_the_goal_is_told_to_the_trainer_and_nothing_further_begins(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "run", stop_metric="greedy", stop_threshold=0.5)
    evaluating = stage.claim()
    evaluating.first(0, leased=False)
    stage.end(1.0)  # version 0, which no training made, ends no run
    evaluating.beside_training(2)
    assert evaluating.goal is None
    stage.end(0.5)
    evaluating.beside_training(4)
    assert evaluating.goal is not None and evaluating.goal.version == 2
    assert stage.store.exists(layout.goal(1)) and stage.control.versions == [0, 2]
    assert "the run ends after its current step" in stage.control.said[-1]
    # The history that reached the goal, and one that was cut off before it.
    assert stage.claim((1, 2)).goal is not None and stage.store.exists(layout.goal(2))
    assert stage.claim((1, 1)).goal is None and not stage.store.exists(layout.goal(3))


def test_a_raised_goal_is_another_goal(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "run", stop_metric="greedy", stop_threshold=0.5)
    evaluating = stage.claim()
    evaluating.beside_training(2)
    stage.end(0.5)
    evaluating.beside_training(2)
    stage.config = RunConfig.model_validate(
        {"evaluation": {"every_steps": 2, "stop_metric": "greedy", "stop_threshold": 0.6}}
    )
    assert stage.claim((1, 2)).goal is None


def test_without_a_held_out_split_nothing_is_evaluated(stage: Stage) -> None:
    stage.rows = []
    evaluating = stage.claim()
    assert not evaluating.first(0, leased=False)
    evaluating.beside_training(9)
    assert not evaluating.last(9)
    assert stage.control.versions == [] and stage.evaluated() == []
