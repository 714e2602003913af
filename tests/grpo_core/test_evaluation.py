"""The figures of an evaluation are those of its stored completions, and only the living history has evaluations."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from grpo_core.config import RunConfig
from grpo_core.evaluation import (
    Evaluation,
    Score,
    goal_of,
    living_evaluations,
    pass_at_k,
    purity_of,
    read_evaluations,
    scores_of,
    with_evaluation_metric,
)
from storage import layout, schema
from storage.attempts import claim_next, living_chain
from storage.checkpoints import Manifest
from storage.layout import EvaluationName
from storage.objects import ObjectStore


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """Attempt 2 resumed from step 4 of attempt 1."""
    store = ObjectStore.open(str(tmp_path / "run"))
    owner = {"host": "h", "pid": 1, "pid_started_at": 1.0, "claimed_at": 1.0}
    claim_next(store, parent=None, **owner)
    claim_next(store, parent=(1, 4), **owner)
    return store


def record(mode: str, index: int, reward: float | None, **facts: Any) -> dict[str, Any]:
    return {"version": 0, "dataset_index": index, "mode": mode, "reward": reward, "prompt": "[]",
            "completion": "", "tokens": 10, "finish_reason": "stop", **facts}  # fmt: skip


def put(store: ObjectStore, attempt: int, version: int, *records: dict[str, Any]) -> None:
    data = schema.encode(schema.table(records, schema.EVALUATION), schema.EVALUATION, {})
    assert store.put_if_absent(layout.evaluation(attempt, version), data)


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(sections)


def test_pass_at_k_is_the_share_of_draws_with_a_right_one() -> None:
    for samples in range(1, 8):
        for correct in range(samples + 1):
            right = [index < correct for index in range(samples)]
            for k in range(1, samples + 1):
                draws = [any(draw) for draw in combinations(right, k)]
                assert pass_at_k(samples, correct, k) == pytest.approx(sum(draws) / len(draws), abs=1e-12)


@pytest.mark.parametrize(("samples", "correct", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_is_not_defined_beyond_the_samples(samples: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of {correct} right among {samples}"):
        pass_at_k(samples, correct, k)


def test_scores_are_means_over_completions_and_over_prompts() -> None:
    first = [record("sampled", 0, reward) for reward in (1.0, 0.5, 0.0, 0.0)]
    second = [record("sampled", 1, reward) for reward in (1.0, 1.0, 1.0, None)]
    greedy = [record("greedy", 0, 0.5), record("greedy", 1, None)]
    scores = scores_of([*first, *second, *greedy], pass_threshold=1.0)
    assert scores["sampled"].mean == pytest.approx(4.5 / 7) and scores["sampled"].samples == 7
    assert scores["greedy"] == Score(0.5, 0.0, 1)
    assert scores["pass@1"].mean == pytest.approx((1 / 4 + 1) / 2) and scores["pass@1"].samples == 2
    assert scores["pass@2"].mean == pytest.approx((1 / 2 + 1) / 2)
    assert "pass@4" not in scores, "half of the prompts have only three"
    assert scores_of([*first, *first], pass_threshold=0.5)["pass@1"].mean == 0.5
    assert scores_of([record("sampled", 0, None)], pass_threshold=1.0) == {}


def test_a_prompt_with_fewer_completions_than_k_is_left_out_of_pass_at_k() -> None:
    whole = [record("sampled", index, 1.0) for index in (0, 1) for _ in range(4)]
    scores = scores_of([*whole, record("sampled", 2, 0.0)], pass_threshold=1.0)
    assert scores["pass@4"] == Score(1.0, 0.0, 2)
    assert scores["pass@1"].mean == pytest.approx(2 / 3)


def test_purity_is_the_share_of_tokens_of_the_version_itself() -> None:
    crossed = [record("sampled", 0, 1.0, version_tokens=10), record("sampled", 0, 1.0, version_tokens=5)]
    assert purity_of(crossed) == 0.75
    assert purity_of([record("sampled", 0, 1.0)]) is None
    line = Evaluation(1, 4, 8, {"sampled": Score(0.5, 0.1, 2)}, 0.75).line()
    assert (
        line
        == "held-out reward of version 4 (step 8): sampled 0.500 ± 0.196 (2); 75% of its tokens are of this version"
    )
    assert "tokens" not in Evaluation(1, 4, 8, {"sampled": Score(0.5, 0.1, 2)}, 1.0).line()


def test_evaluations_of_dead_branches_do_not_count(store: ObjectStore) -> None:
    for attempt, version in ((1, 0), (1, 2), (1, 3), (2, 3), (2, 0)):
        put(store, attempt, version, record("greedy", 0, attempt + version / 10))
    put_name = layout.evaluation(1, 1, "other")
    store.put(put_name, b"another held-out set")
    names = living_evaluations(store, living_chain(store), every_steps=2)
    assert names == [EvaluationName(2, 0), EvaluationName(1, 2), EvaluationName(2, 3)]
    found = read_evaluations(store, config(refit={"every_steps": 2}))
    assert [(each.version, each.step, each.scores["greedy"].mean) for each in found] == [
        (0, 0, pytest.approx(2.0)), (2, 4, pytest.approx(1.2)), (3, 6, pytest.approx(2.3))
    ]  # fmt: skip


def test_an_evaluation_says_what_it_was_due_for_and_what_has_no_score(store: ObjectStore) -> None:
    rewards = ((0, 1.0), (0, None), (1, None), (1, None), (2, 0.0))
    put(store, 1, 2, *(record("sampled", index, reward, due_version=1) for index, reward in rewards))
    (found,) = read_evaluations(store, config())
    assert (found.version, found.due, found.unscored_prompts) == (2, 1, 2)
    assert found.line().startswith("held-out reward of version 2 (step 2, due at version 1): sampled 0.500")
    assert found.line().endswith("; 2 of its prompts have completions without a score")
    assert "due" not in replace(found, due=2).line() and "due" not in replace(found, due=None).line()


def test_a_file_from_before_versions_were_told_can_be_read(store: ObjectStore) -> None:
    old = schema.EVALUATION
    for name in ("due_version", "min_version", "max_version", "version_tokens"):
        old = old.remove(old.get_field_index(name))
    store.put_if_absent(layout.evaluation(1, 0), schema.encode(schema.table([record("greedy", 0, 1.0)], old), old, {}))
    (found,) = read_evaluations(store, config())
    assert found.scores["greedy"].mean == 1.0 and found.purity is None


def test_the_goal_is_the_first_trained_version_that_reaches_the_threshold() -> None:
    settings = config(evaluation={"every_steps": 1, "stop_metric": "greedy", "stop_threshold": 0.5})
    made = [Evaluation(1, v, v, {"greedy": Score(mean, 0.0, 4)}) for v, mean in enumerate((0.9, 0.4, 0.5, 0.6))]
    assert goal_of(made, settings) == made[2]
    assert goal_of(made[:2], settings) is None
    assert goal_of(made, config()) is None
    assert goal_of([Evaluation(1, 2, 2, {})], settings) is None


def test_a_stored_reward_reaches_a_threshold_of_the_same_value(store: ObjectStore) -> None:
    put(store, 1, 2, *(record("sampled", index, 0.7) for index in range(3)))
    goal = {"every_steps": 1, "stop_metric": "sampled", "stop_threshold": 0.7, "pass_threshold": 0.7}
    (found,) = made = read_evaluations(store, config(evaluation=goal))
    assert found.scores["sampled"].mean < 0.7 and found.scores["pass@1"].mean == 1.0
    assert goal_of(made, config(evaluation=goal)) == found


def test_checkpoints_have_the_metric_of_the_newest_evaluation_before_them(store: ObjectStore) -> None:
    for attempt, version, reward in ((1, 2, 0.25), (1, 5, 0.75), (2, 6, 0.5)):
        put(store, attempt, version, record("greedy", 0, reward))
    names = ((1, 1), (1, 3), (1, 5), (2, 5), (2, 6))
    manifests = [Manifest(attempt, step, step, {}, {}, 0.0, metrics={"loss": 1.0}) for attempt, step in names]
    metric = "evaluation/greedy"
    ranked = with_evaluation_metric(store, manifests, config(checkpointing={"metric_name": metric}))
    assert [manifest.metrics.get(metric) for manifest in ranked] == [None, 0.25, None, 0.25, 0.5]
    assert all(manifest.metrics["loss"] == 1.0 for manifest in ranked)
    assert with_evaluation_metric(store, manifests, config()) == manifests
