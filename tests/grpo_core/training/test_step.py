"""A step is the same however its rows are packed and spread over ranks, and a bad one leaves no trace."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.grpo_core import tiny
from tests.grpo_core.training import ranks

SCENARIOS: dict[str, dict[str, Any]] = {
    "one micro-batch": {"token_budget": 1000},
    "many micro-batches": {"token_budget": 24},
    "stale replaced": {"token_budget": 1000, "spoil_stale": -77.0},
    "stale nan": {"token_budget": 24, "spoil_stale": math.nan},
    "one row": {"token_budget": 64, "rows": 1},
    "sequence ratio": {"token_budget": 24, "loss_type": "gspo"},
    "sequence ratio, one micro-batch": {"token_budget": 1000, "loss_type": "gspo"},
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("policy") / "tiny")


class Outcome:
    """What each scenario gave on one number of ranks."""

    def __init__(self, answers: list[dict[str, Any]], directory: Path) -> None:
        self.ranks = answers
        self.directory = directory

    def weights(self, scenario: str) -> dict[str, np.ndarray]:
        with np.load(self.directory / f"{scenario}.npz") as arrays:
            return {name: arrays[name] for name in arrays.files}

    def logprobs(self, scenario: str) -> list[dict[int, list[float]]]:
        """Of every row that is no filler, by step, over all ranks."""
        steps: list[dict[int, list[float]]] = [{}, {}, {}]
        for answer in self.ranks:
            for number, found in enumerate(answer[scenario]["logprobs"]):
                steps[number] |= {index: values for index, values in found.items() if values}
        return steps


@pytest.fixture(scope="module")
def outcomes(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Outcome]:
    made = {}
    for world in (1, 2):
        directory = tmp_path_factory.mktemp(f"world-{world}")
        made[world] = Outcome(ranks.run(world, ranks.three_steps, policy, directory, SCENARIOS), directory)
    return made


def assert_same(left: Outcome, one: str, right: Outcome, other: str) -> None:
    for key in ("losses", "norms"):
        assert left.ranks[0][one][key] == pytest.approx(right.ranks[0][other][key], rel=1e-6, abs=1e-6)
    expected = right.weights(other)
    for name, found in left.weights(one).items():
        np.testing.assert_allclose(found, expected[name], rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_ranks_give_what_one_gives(outcomes: dict[int, Outcome], scenario: str) -> None:
    assert_same(outcomes[2], scenario, outcomes[1], scenario)
    for one, two in zip(outcomes[1].logprobs(scenario), outcomes[2].logprobs(scenario), strict=True):
        assert one.keys() == two.keys()
        for index, values in one.items():
            assert values == pytest.approx(two[index], abs=1e-5)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("one micro-batch", "many micro-batches"),
        ("sequence ratio, one micro-batch", "sequence ratio"),
    ],
)
def test_any_packing_gives_the_same_step(outcomes: dict[int, Outcome], world: int, one: str, other: str) -> None:
    assert_same(outcomes[world], one, outcomes[world], other)


@pytest.mark.parametrize("scenario", ["stale replaced", "stale nan"])
def test_what_is_known_of_stale_tokens_changes_no_weight(outcomes: dict[int, Outcome], scenario: str) -> None:
    same_packing = "one micro-batch" if scenario == "stale replaced" else "many micro-batches"
    expected = outcomes[1].weights(same_packing)
    for name, found in outcomes[1].weights(scenario).items():
        np.testing.assert_array_equal(found, expected[name], err_msg=name)


def test_steps_do_move_the_weights(outcomes: dict[int, Outcome]) -> None:
    plain, ratio = outcomes[1].weights("one micro-batch"), outcomes[1].weights("sequence ratio")
    assert any(np.abs(plain[name] - ratio[name]).max() > 1e-4 for name in plain)
    assert all(norm > 0 for norm in outcomes[1].ranks[0]["one micro-batch"]["norms"])


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_rank_reports_the_same_figures(outcomes: dict[int, Outcome], scenario: str) -> None:
    first, second = (answer[scenario] for answer in outcomes[2].ranks)
    assert (first["losses"], first["norms"], first["pairs"]) == (second["losses"], second["norms"], second["pairs"])


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_that_is_not_finite_leaves_the_weights_untouched(policy: Path, world: int) -> None:
    for answer in ranks.run(world, ranks.bad_step, policy):
        assert "step 1" in answer["message"] and "not finite" in answer["message"]
        assert answer["untouched"] and answer["moved"]
        assert math.isfinite(answer["loss"])
