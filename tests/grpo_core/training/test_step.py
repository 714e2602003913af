"""A step is the same however its rows are packed and spread over ranks, and a bad one leaves no trace."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from grpo_core.objective.diagnostics import RATIO_EXTREMES
from grpo_core.objective.settings import LossType
from tests.grpo_core import experts, tiny
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
    for figures in ("losses", "norms", "pairs", "extremes"):
        assert first[figures] == second[figures]


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_that_is_not_finite_leaves_the_weights_untouched(policy: Path, world: int) -> None:
    for answer in ranks.run(world, ranks.bad_step, policy):
        assert "step 1" in answer["message"] and "not finite" in answer["message"]
        assert answer["untouched"] and answer["moved"]
        assert math.isfinite(answer["loss"])


EXPERTS = {"model": {"router_aux_loss_coefficient": 0.1}}
LEARNING: dict[str, dict[str, Any]] = {
    "double": {"steps": 5, "double": True},
    "single": {"steps": 5},
    "alone": {"config": {"packing": {"share_prefixes": False}}},
    "updates": {"config": {"grpo": {"minibatches": 3}, "objective": {"epsilon": 1e-4}}},
    "log-linear": {
        "config": {
            "grpo": {"minibatches": 2},
            "objective": {"proximal_policy": "log_linear", "positive_nll_weight": 0.1},
        }
    },
    "frozen copy": {"config": {"objective": {"beta": 0.5}}},
    "adapters": {"config": {"model": {"lora": ranks.LORA}, "objective": {"beta": 0.5}}},
    "experts": {"config": EXPERTS, "policy": "experts"},
    "experts, adapters": {"config": {"model": {"lora": {"rank": 4}}}, "policy": "experts"},
    "experts, small rows": {"config": EXPERTS | {"packing": {"share_prefixes": False}}, "policy": "experts"},
}


@pytest.fixture(scope="module")
def learnt(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Outcome]:
    mixture = str(experts.make(tmp_path_factory.mktemp("policy") / "experts"))
    scenarios = {
        name: scenario | ({"policy": mixture} if "policy" in scenario else {}) for name, scenario in LEARNING.items()
    }
    made = {}
    for world in (1, 2):
        directory = tmp_path_factory.mktemp(f"learnt-{world}")
        made[world] = Outcome(ranks.run(world, ranks.learn, policy, directory, scenarios), directory)
    return made


def assert_close(left: Outcome, one: str, right: Outcome, other: str, tolerance: float) -> None:
    for key in ("losses", "norms"):
        assert left.ranks[0][one][key] == pytest.approx(right.ranks[0][other][key], rel=tolerance, abs=tolerance)
    expected = right.weights(other)
    for name, found in left.weights(one).items():
        np.testing.assert_allclose(found, expected[name], rtol=0, atol=tolerance, err_msg=name)


def test_five_steps_in_double_precision_are_the_same_on_two_ranks(learnt: dict[int, Outcome]) -> None:
    assert_close(learnt[2], "double", learnt[1], "double", 1e-9)
    arrays = learnt[1].weights("double")
    assert {name.removeprefix("gradient.") for name in arrays if name.startswith("gradient.")} == {
        name for name in arrays if not name.startswith("gradient.")
    }
    assert all(array.dtype == np.float64 for array in arrays.values())


def test_five_steps_in_single_precision_have_the_same_loss_on_two_ranks(learnt: dict[int, Outcome]) -> None:
    one, two = (learnt[world].ranks[0]["single"]["losses"] for world in (1, 2))
    assert one == pytest.approx(two, abs=1e-6, rel=1e-6)
    assert one == pytest.approx(learnt[1].ranks[0]["double"]["losses"], abs=1e-5)


@pytest.mark.parametrize("name", LEARNING)
def test_every_kind_of_step_is_the_same_on_two_ranks(learnt: dict[int, Outcome], name: str) -> None:
    assert_close(learnt[2], name, learnt[1], name, 5e-6)


@pytest.mark.parametrize("name", LEARNING)
def test_extremes_are_those_of_all_ranks_and_updates(learnt: dict[int, Outcome], name: str) -> None:
    for one, two in zip(learnt[1].ranks[0][name]["extremes"], learnt[2].ranks[0][name]["extremes"], strict=True):
        assert one.keys() == two.keys() == {*RATIO_EXTREMES, "micro_batch_tokens_max"}
        assert [one[metric] for metric in RATIO_EXTREMES] == pytest.approx(
            [two[metric] for metric in RATIO_EXTREMES], abs=1e-4
        )
        assert one["ratio_min"] <= one["ratio_max"] and one["ratio_clamped_min"] <= one["ratio_clamped_max"]


def test_extremes_enclose_the_mean(learnt: dict[int, Outcome]) -> None:
    single, several = (learnt[2].ranks[0][name]["extremes"][0] for name in ("single", "updates"))
    assert single["ratio_min"] == single["ratio_max"] == 1.0
    assert several["ratio_min"] < ratio(learnt[2], "updates", "ratio") < several["ratio_max"]


def ratio(outcome: Outcome, name: str, metric: str, step: int = 0) -> float:
    numerator, denominator = outcome.ranks[0][name]["pairs"][step][metric]
    return numerator / denominator


@pytest.mark.parametrize("world", [1, 2])
def test_shared_prefixes_change_nothing_but_the_tokens_forwarded(learnt: dict[int, Outcome], world: int) -> None:
    first, other = (learnt[world].ranks[0][name] for name in ("single", "alone"))
    assert first["losses"][:2] == pytest.approx(other["losses"], abs=1e-5)
    assert first["norms"][:2] == pytest.approx(other["norms"], rel=1e-5)
    assert ratio(learnt[world], "single", "prefix_tokens_saved") > 0.1
    assert ratio(learnt[world], "alone", "prefix_tokens_saved") == 0


@pytest.fixture(scope="module")
def by_loss(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Outcome]:
    """One step of every kind of loss, by whether prefixes are shared."""
    made = {}
    for share in (True, False):
        directory = tmp_path_factory.mktemp("by-loss")
        scenarios = {
            loss: {"steps": 1, "config": {"objective": {"loss_type": loss}, "packing": {"share_prefixes": share}}}
            for loss in get_args(LossType)
        }
        made[share] = Outcome(ranks.run(1, ranks.learn, policy, directory, scenarios), directory)
    return made


@pytest.mark.parametrize("loss", get_args(LossType))
def test_shared_prefixes_change_no_kind_of_loss(by_loss: dict[bool, Outcome], loss: str) -> None:
    assert_close(by_loss[True], loss, by_loss[False], loss, 5e-6)
    assert by_loss[True].ranks[0][loss]["norms"][0] > 0
    assert ratio(by_loss[True], loss, "prefix_tokens_saved") > 0.1
    assert ratio(by_loss[False], loss, "prefix_tokens_saved") == 0


CORRECTIONS: dict[str, dict[str, Any]] = {
    "penalty": {"beta": 0.5, "kl_placement": "reward"},
    "some believed": {"sequence_error_threshold": 2.0, "positive_nll_weight": 0.1},
    "none believed": {"sequence_error_threshold": 1.0, "positive_nll_weight": 0.1},
}


@pytest.fixture(scope="module")
def corrected(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Outcome]:
    scenarios = {name: {"config": {"objective": objective}} for name, objective in CORRECTIONS.items()}
    made = {}
    for world in (1, 2):
        directory = tmp_path_factory.mktemp(f"corrected-{world}")
        made[world] = Outcome(ranks.run(world, ranks.learn, policy, directory, scenarios), directory)
    return made


@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_of_sequences_are_the_same_on_two_ranks(corrected: dict[int, Outcome], name: str) -> None:
    assert_close(corrected[2], name, corrected[1], name, 5e-6)


def test_a_divergence_paid_from_the_reward_begins_with_the_second_step(
    corrected: dict[int, Outcome], learnt: dict[int, Outcome]
) -> None:
    paid, plain, added = (
        corrected[1].ranks[0]["penalty"],
        *(learnt[1].ranks[0][name] for name in ("single", "frozen copy")),
    )
    assert paid["losses"][0] == pytest.approx(plain["losses"][0], abs=1e-6)
    assert paid["norms"][0] == pytest.approx(plain["norms"][0], abs=1e-5)
    assert abs(paid["norms"][1] - plain["norms"][1]) > 1e-4
    assert abs(paid["losses"][1] - added["losses"][1]) > 1e-4
    assert ratio(corrected[1], "penalty", "kl_reference", step=1) > 1e-6


def test_sequences_that_are_not_believed_train_nothing(corrected: dict[int, Outcome]) -> None:
    some, none = corrected[1].ranks[0]["some believed"], corrected[1].ranks[0]["none believed"]
    assert 0 < ratio(corrected[1], "some believed", "sequence_error_masked") < 1
    assert some["norms"][0] > 0
    assert ratio(corrected[1], "none believed", "sequence_error_masked") == 1
    assert none["losses"] == none["norms"] == [0, 0]


@pytest.mark.parametrize("world", [1, 2])
def test_an_update_in_which_nothing_may_be_trained_is_not_made(policy: Path, world: int) -> None:
    for answer in ranks.run(world, ranks.untrained_updates, policy):
        assert answer["made"] == [1, 0, 2]
        assert answer["moved"] == [True, False, True]
        assert answer["norms"][1] == answer["losses"][1] == 0.0


def test_one_update_has_a_ratio_of_one_and_several_do_not(learnt: dict[int, Outcome]) -> None:
    assert ratio(learnt[1], "single", "ratio") == 1.0
    assert ratio(learnt[1], "single", "clip_ratio/region") == 0
    assert ratio(learnt[1], "updates", "ratio") != 1.0
    # Tokens are of version 1 and training is at 2: the proximal policy lies half-way, from the first update on.
    assert ratio(learnt[1], "log-linear", "ratio") != 1.0
    assert ratio(learnt[1], "log-linear", "positive_nll") > 0
    assert ratio(learnt[1], "updates", "clip_ratio/region") > 0


def test_old_log_probs_are_those_of_the_start_of_the_step(policy: Path) -> None:
    (answer,) = ranks.run(1, ranks.old_logprobs, policy)
    for index, before in enumerate(answer["before"]):
        assert answer["reported"][index] == pytest.approx(before, abs=1e-5)
    assert any(
        abs(one - two) > 1e-3
        for before, after in zip(answer["before"], answer["after"], strict=True)
        for one, two in zip(before, after, strict=True)
    )


@pytest.mark.parametrize("name", ["frozen copy", "adapters"])
def test_the_reference_is_the_policy_before_the_first_step(learnt: dict[int, Outcome], name: str) -> None:
    assert ratio(learnt[1], name, "kl_reference", step=0) == pytest.approx(0, abs=1e-9)
    assert ratio(learnt[1], name, "kl_reference", step=1) > 1e-6


def test_only_adapters_are_trained(learnt: dict[int, Outcome]) -> None:
    moved = learnt[1].ranks[0]["adapters"]["moved"]
    assert len(moved) == 2 * 2 * 2  # layers, chosen modules, two factors
    assert all("lora_" in name for name in moved)
    assert not any("lora_" in name for name in learnt[1].ranks[0]["single"]["moved"])


def test_the_router_term_does_not_depend_on_packing(learnt: dict[int, Outcome]) -> None:
    assert_close(learnt[1], "experts", learnt[1], "experts, small rows", 5e-6)
    assert any(name.endswith("mlp.gate.weight") for name in learnt[1].ranks[0]["experts"]["moved"])
    assert ratio(learnt[1], "experts", "router_imbalance") >= 2.0


@pytest.mark.parametrize("how", ["dies", "stands still"])
def test_a_rank_that_is_lost_fails_the_others_within_the_deadline(policy: Path, tmp_path: Path, how: str) -> None:
    first, second = ranks.run(2, ranks.leave_the_group, policy, tmp_path / "said", how, deadline=8)
    assert second is None
    assert "Error" in first and "nothing happened" not in first
