"""The objective has the documented values and gradients, and depends neither on packing nor on masked positions."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_core.objective import blocks
from grpo_core.objective.losses import Denominators, ObjectiveError, policy_loss

CASE = json.loads((Path(__file__).parents[2] / "cases" / "losses.json").read_text())
LOSS_TYPES = ("grpo", "dapo", "dr_grpo", "bnpo", "gspo", "cispo", "reinforce")


@dataclass(frozen=True)
class Objective:
    """Settings with everything optional switched off."""

    loss_type: str = "dapo"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    dual_clip: float | None = None
    beta: float = 0.0
    kl_type: str = "k3"
    kl_input_clamp: float = 20.0
    kl_output_clamp: float = 10.0
    entropy_coefficient: float = 0.0
    importance_correction: str = "none"
    importance_mode: str = "truncate"
    importance_cap: float = math.inf
    importance_floor: float | None = None
    force_on_policy_ratio: bool = False
    ratio_level: str | None = None
    proximal_policy: str = "recomputed"
    kl_placement: str = "loss"
    kl_importance_weight: bool = False
    positive_nll_weight: float = 0.0
    sequence_error_threshold: float | None = None


EVERYTHING = Objective(
    epsilon_high=0.3,
    dual_clip=3.0,
    beta=0.1,
    entropy_coefficient=0.01,
    importance_correction="token",
    importance_cap=2.0,
    positive_nll_weight=0.1,
    sequence_error_threshold=1.3,
)
PROXIMAL = ("recomputed", "behaviour", "log_linear")


def values(name: str) -> Tensor:
    return torch.tensor(CASE[name], dtype=torch.float64)


def documented(config: Objective, advantage: float = 1.0, **extra: Any) -> tuple[float, dict[str, float]]:
    """Loss and metric means of the documented sequence of four tokens."""
    ones = torch.ones(4, dtype=torch.float64)
    loss, metrics = policy_loss(
        values("cur"),
        values("old"),
        values("gen"),
        advantage * ones,
        ones,
        torch.zeros(4, dtype=torch.long),
        config,
        **extra,
    )
    return float(loss), {name: float(top) / float(bottom) for name, (top, bottom) in metrics.items()}


@dataclass(frozen=True)
class Batch:
    """Flat inputs of a step."""

    logprobs: Tensor
    old_logprobs: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    sequence_ids: Tensor
    reference_logprobs: Tensor
    entropy: Tensor
    lags: Tensor
    positive: Tensor

    @classmethod
    def draw(cls, lengths: list[int], seed: int = 0, dtype: torch.dtype = torch.float64) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        tokens = sum(lengths)
        ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        old = -torch.rand(tokens, generator=generator, dtype=torch.float64) * 3 - 0.1

        def near(spread: float) -> Tensor:
            return (old + spread * torch.randn(tokens, generator=generator, dtype=torch.float64)).to(dtype)

        mask = torch.rand(tokens, generator=generator) < 0.7
        mask[torch.tensor(lengths).cumsum(0) - 1] = True
        advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)[ids].to(dtype)
        lags, positive = ids % 3, advantages > 0
        return cls(
            near(0.3), old.to(dtype), near(0.2), advantages, mask, ids, near(0.5), near(0.1).abs(), lags, positive
        )

    def select(self, places: Tensor) -> Batch:
        return Batch(**{name: getattr(self, name)[places] for name in self.__dataclass_fields__})

    def extremes(self, config: Objective) -> dict[str, float]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        found: dict[str, Tensor] = {}
        policy_loss(**fields, config=config, denominators=self.denominators(), extremes=found)
        return {name: float(value) for name, value in found.items()}

    def loss(self, config: Objective, denominators: Denominators | None = None) -> tuple[Tensor, dict[str, Any]]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return policy_loss(**fields, config=config, denominators=denominators)

    def value_and_gradient(
        self, config: Objective, denominators: Denominators | None = None
    ) -> tuple[Tensor, Tensor, Any]:
        leaf = self.logprobs.clone().requires_grad_()
        loss, metrics = replace(self, logprobs=leaf).loss(config, denominators)
        loss.backward()
        assert leaf.grad is not None
        return loss.detach(), leaf.grad, metrics

    def denominators(self) -> Denominators:
        sequences = len(self.sequence_ids[self.mask].unique())
        positive = (self.positive & self.mask).sum()
        return Denominators(int(self.mask.sum()), sequences, sequences * 16.0, int(positive))


@pytest.mark.parametrize(
    ("expected", "config", "advantage"),
    [
        (CASE["advantage_plus_one"]["token_mean_no_correction"], Objective(), 1),
        (CASE["advantage_plus_one"]["token_mean_corrected"], Objective(importance_correction="token"), 1),
        (
            CASE["advantage_plus_one"]["token_mean_truncated_at_1.2"],
            Objective(importance_correction="token", importance_cap=1.2),
            1,
        ),
        (
            CASE["advantage_plus_one"]["token_mean_icepop_0.5_1.5"],
            Objective(importance_correction="token", importance_mode="band", importance_floor=0.5, importance_cap=1.5),
            1,
        ),
        (CASE["advantage_plus_one"]["gspo_loss"], Objective("gspo", importance_correction="sequence"), 1),
        (sum(CASE["advantage_plus_one"]["cispo_terms"]) / 4, Objective("cispo"), 1),
        (CASE["advantage_minus_one"]["token_mean_corrected"], Objective(importance_correction="token"), -1),
        (sum(CASE["advantage_minus_one"]["per_token_loss"]) / 4, Objective(), -1),
        ((1.221403 + 0.8 + 1 + 1.5) / 4, Objective(dual_clip=1.5), -1),
        (4.5 / 4, Objective("reinforce"), 1),
    ],
)
def test_documented_loss(expected: float, config: Objective, advantage: float) -> None:
    assert documented(config, advantage)[0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3"])
def test_documented_kl_to_reference(kl_type: str) -> None:
    config = Objective(beta=0.5, kl_type=kl_type)
    loss, metrics = documented(config, 0.0, reference_logprobs=values("ref"))
    assert loss == pytest.approx(0.5 * CASE["kl_to_reference_mean"][kl_type], abs=1e-5)
    assert metrics["kl_reference"] == pytest.approx(CASE["kl_to_reference_mean"][kl_type], abs=1e-5)


def test_documented_ratios_and_weights() -> None:
    _, metrics = documented(Objective(importance_correction="token"))
    assert metrics["ratio"] == pytest.approx(sum(CASE["ratio"]) / 4, abs=1e-5)
    assert metrics["importance_weight"] == pytest.approx(sum(CASE["importance_weight"]) / 4, abs=1e-5)
    assert metrics["importance_weight_squared"] == pytest.approx(
        sum(weight**2 for weight in CASE["importance_weight"]) / 4, abs=1e-5
    )
    gspo = documented(Objective("gspo"))[1]
    assert gspo["ratio"] == pytest.approx(CASE["advantage_plus_one"]["gspo_ratio"], abs=1e-5)


def test_clip_metrics_count_only_tokens_that_the_clip_holds() -> None:
    plus, minus = documented(Objective(), 1)[1], documented(Objective(), -1)[1]
    assert (plus["clip_ratio/low"], plus["clip_ratio/high"], plus["clip_ratio/region"]) == (0, 0.5, 0.5)
    assert (minus["clip_ratio/low"], minus["clip_ratio/high"], minus["clip_ratio/region"]) == (0.25, 0, 0.25)


def test_extremes_are_those_of_trained_tokens_and_whole_sequences() -> None:
    batch = Batch.draw([5, 8, 13, 6, 9, 7], seed=3)
    poisoned = replace(batch, logprobs=torch.where(batch.mask, batch.logprobs, math.nan))
    found = poisoned.extremes(Objective(epsilon=0.02, epsilon_high=0.02))
    trained = batch.mask
    ratios = (batch.logprobs - batch.old_logprobs)[trained].exp()
    assert (found["ratio_min"], found["ratio_max"]) == pytest.approx((float(ratios.min()), float(ratios.max())))
    held = torch.where(batch.advantages[trained] < 0, ratios < 0.98, torch.zeros_like(ratios) > 1)
    above = torch.where(batch.advantages[trained] > 0, ratios > 1.02, torch.zeros_like(ratios) > 1)
    ids = batch.sequence_ids[trained]
    shares = [[float(side[ids == number].double().mean()) for number in range(6)] for side in (held, above)]
    assert found["clip_ratio/low_min"] == pytest.approx(min(shares[0]))
    assert found["clip_ratio/high_max"] == pytest.approx(max(shares[1])) and max(shares[1]) > 0
    assert found["ratio_clamped_max"] <= found["ratio_max"]


def test_extremes_do_not_depend_on_how_tokens_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch.draw([5, 8, 13], seed=3)
    whole = batch.extremes(Objective())
    monkeypatch.setattr(blocks, "CPU_BLOCK_TOKENS", 8)
    assert batch.extremes(Objective()) == pytest.approx(whole)
    nothing = replace(batch, mask=torch.zeros_like(batch.mask))
    assert nothing.extremes(Objective()) == {}


def test_documented_micro_batches_give_the_mean_of_the_step() -> None:
    total = 0.0
    sizes = [tokens for tokens, _ in CASE["packing_invariance"]["micro_batches"]]
    for tokens, mean in CASE["packing_invariance"]["micro_batches"]:
        batch = torch.full((tokens,), -1.0, dtype=torch.float64)
        step = Denominators(tokens=sum(sizes), sequences=2)
        loss, _ = policy_loss(
            batch,
            batch,
            batch,
            batch * -mean,
            batch,
            torch.zeros(tokens, dtype=torch.long),
            Objective("reinforce"),
            denominators=step,
        )
        total += float(loss)
    assert total == pytest.approx(CASE["packing_invariance"]["step_token_mean"])


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_mean_is_taken_over_what_the_loss_type_says(loss_type: str) -> None:
    lengths = torch.tensor([1, 3])
    ids = torch.repeat_interleave(torch.arange(2), lengths)
    flat, advantages = torch.full((4,), -1.0), torch.tensor([1.0, 2.0, 2.0, 2.0])
    loss, _ = policy_loss(
        flat, flat, flat, advantages, torch.ones(4), ids, Objective(loss_type), denominators=Denominators(4, 2, 20)
    )
    sign = 1 if loss_type in ("cispo", "reinforce") else -1
    expected = {"grpo": 3 / 2, "gspo": 3 / 2, "dr_grpo": 7 / 20}.get(loss_type, 7 / 4)
    assert float(loss) == pytest.approx(sign * expected)


@pytest.mark.parametrize("loss_type", [kind for kind in LOSS_TYPES if kind != "cispo"])
@pytest.mark.parametrize("correction", ["none", "token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "band", "mask"])
def test_gradient_agrees_with_finite_differences(loss_type: str, correction: str, mode: str) -> None:
    batch = Batch.draw([3, 1, 4])
    config = replace(
        EVERYTHING,
        loss_type=loss_type,
        beta=0.0,
        importance_correction=correction,
        importance_mode=mode,
        importance_floor=0.6,
    )

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        return replace(batch, logprobs=logprobs, entropy=entropy).loss(config, batch.denominators())[0]

    inputs = batch.logprobs.clone().requires_grad_(), batch.entropy.clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, inputs, eps=1e-7, atol=1e-6)


def test_cispo_gradient_is_the_clipped_ratio_times_the_advantage() -> None:
    batch = Batch.draw([3, 5])
    _, gradient, _ = batch.value_and_gradient(Objective("cispo"))
    ratio = (batch.logprobs - batch.old_logprobs).exp().clamp(0.8, 1.2)
    expected = torch.where(batch.mask, -batch.advantages * ratio, 0.0) / batch.mask.sum()
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize(
    ("kl_type", "own"),
    [
        ("k1", lambda x: torch.ones_like(x)),
        ("k2", lambda x: -x),
        ("k3", lambda x: 1 - x.exp()),
    ],
)
def test_kl_gradient_has_its_score_function_term(kl_type: str, own: Any) -> None:
    batch = replace(Batch.draw([8]), advantages=torch.zeros(8, dtype=torch.float64))
    batch = replace(batch, mask=torch.ones(8))
    _, gradient, metrics = batch.value_and_gradient(Objective(beta=1.0, kl_type=kl_type))
    x = batch.reference_logprobs - batch.logprobs
    estimate = {"k1": -x, "k2": x.square() / 2, "k3": x.exp() - 1 - x}[kl_type]
    torch.testing.assert_close(gradient, (estimate + own(x)) / 8)
    assert float(metrics["kl_reference"][0]) == pytest.approx(float(estimate.sum()))


def test_clamped_kl_has_no_gradient() -> None:
    batch = replace(Batch.draw([4]), advantages=torch.zeros(4, dtype=torch.float64), mask=torch.ones(4))
    far = replace(batch, reference_logprobs=batch.logprobs + torch.tensor([3.0, 0.1, -3.0, 0.1], dtype=torch.float64))
    for limits in ({"kl_input_clamp": 1.0}, {"kl_output_clamp": 0.5, "kl_type": "k1"}):
        _, gradient, _ = far.value_and_gradient(Objective(beta=1.0, **limits))
        assert gradient.ne(0).tolist() == [False, True, False, True]


def test_on_policy_ratio_is_one_and_needs_no_old_logprobs() -> None:
    batch = Batch.draw([4, 4])
    forced = Objective(force_on_policy_ratio=True, importance_correction="token")
    loss, gradient, metrics = replace(batch, old_logprobs=None).value_and_gradient(forced)  # type: ignore[arg-type]
    weight = (batch.logprobs - batch.behaviour_logprobs).exp()
    expected = torch.where(batch.mask, -batch.advantages * weight, 0.0) / batch.mask.sum()
    torch.testing.assert_close(gradient, expected)
    assert float(loss) == pytest.approx(float(expected.sum()))
    assert float(metrics["ratio"][0]) == float(metrics["ratio"][1])


def test_weight_that_is_not_finite_counts_as_zero_before_truncation() -> None:
    batch = replace(Batch.draw([4]), mask=torch.ones(4))
    lost = batch.behaviour_logprobs.clone()
    lost[1] = -math.inf
    config = Objective("reinforce", importance_correction="token", importance_cap=2.0)
    _, gradient, metrics = replace(batch, behaviour_logprobs=lost).value_and_gradient(config)
    assert gradient.ne(0).tolist() == [True, False, True, True]
    assert float(metrics["importance_weight"][0]) < 3 * 2.0
    assert float(metrics["importance_clipped"][0]) >= 1


def test_sequence_mask_removes_whole_sequences_and_keeps_the_weights_of_others() -> None:
    batch = replace(Batch.draw([3, 3]), mask=torch.ones(6))
    shift = torch.tensor([1.0, 1.0, 1.0, 0.1, -0.1, 0.0], dtype=torch.float64)
    batch = replace(batch, behaviour_logprobs=batch.old_logprobs - shift)
    config = Objective(importance_correction="token", importance_mode="mask", importance_floor=0.5, importance_cap=2.0)
    _, metrics = batch.loss(config)
    assert float(metrics["importance_weight"][0]) == pytest.approx(float(shift[3:].exp().sum()))
    assert float(metrics["importance_clipped"][0]) == 3


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_ratio_keeps_value_and_gradient_finite(advantage: float) -> None:
    batch = replace(Batch.draw([2], dtype=torch.float32), mask=torch.ones(2), advantages=torch.full((2,), advantage))
    batch = replace(batch, old_logprobs=batch.logprobs - torch.tensor([200.0, -200.0]))
    loss, gradient, _ = batch.value_and_gradient(Objective(dual_clip=3.0))
    assert loss.isfinite() and gradient.isfinite().all()


lengths = st.lists(st.integers(1, 6), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(lengths, st.sampled_from(LOSS_TYPES), st.data())
def test_loss_does_not_depend_on_packing(sizes: list[int], loss_type: str, data: st.DataObject) -> None:
    batch = Batch.draw(sizes, data.draw(st.integers(0, 99)), torch.float32)
    config = replace(
        EVERYTHING,
        loss_type=loss_type,
        importance_correction=data.draw(st.sampled_from(["token", "sequence", "geometric"])),
        ratio_level=data.draw(st.sampled_from([None, "token", "sequence"])),
        proximal_policy=data.draw(st.sampled_from(PROXIMAL)),
        kl_placement=data.draw(st.sampled_from(["loss", "reward"])),
    )
    whole, whole_gradient, whole_metrics = batch.value_and_gradient(config, batch.denominators())
    order = data.draw(st.permutations(range(len(sizes))))
    cut = data.draw(st.integers(0, len(sizes)))
    loss, gradient, sums = torch.zeros(()), torch.zeros_like(whole_gradient), dict[str, Tensor]()
    for part in (order[:cut], order[cut:]):
        places = torch.cat([torch.arange(sum(sizes))[batch.sequence_ids == sequence] for sequence in [*part, -1]])
        value, part_gradient, metrics = batch.select(places).value_and_gradient(config, batch.denominators())
        loss += value
        gradient[places] += part_gradient
        for name, pair in metrics.items():
            sums[name] = sums.get(name, torch.zeros(2)) + torch.tensor([float(number) for number in pair])
    torch.testing.assert_close(loss, whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-6, atol=1e-6)
    for name, pair in whole_metrics.items():
        torch.testing.assert_close(sums[name], torch.tensor([float(number) for number in pair]), rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(lengths, st.sampled_from(LOSS_TYPES), st.sampled_from([math.nan, math.inf, -math.inf, 1e30]), st.integers(0, 99))
def test_masked_positions_change_neither_value_nor_gradient(
    sizes: list[int], loss_type: str, poison: float, seed: int
) -> None:
    batch = Batch.draw(sizes, seed)
    config = replace(EVERYTHING, loss_type=loss_type)
    poisoned = Batch(
        **{
            name: getattr(batch, name)
            if name in ("mask", "sequence_ids", "lags", "positive")
            else torch.where(batch.mask, getattr(batch, name), poison)
            for name in batch.__dataclass_fields__
        }
    )
    expected, expected_gradient, expected_metrics = batch.value_and_gradient(config, batch.denominators())
    loss, gradient, metrics = poisoned.value_and_gradient(config, batch.denominators())
    assert torch.equal(loss, expected) and torch.equal(gradient, expected_gradient)
    assert not gradient[~batch.mask].any()
    assert metrics == expected_metrics


def test_call_without_trained_tokens_is_zero() -> None:
    batch = replace(Batch.draw([3]), mask=torch.zeros(3))
    for loss_type in LOSS_TYPES:
        loss, gradient, _ = batch.value_and_gradient(Objective(loss_type), Denominators(0, 0, 16))
        assert loss == 0 and not gradient.any()


def test_metrics_carry_no_gradient() -> None:
    batch = Batch.draw([3, 2])
    _, metrics = replace(batch, logprobs=batch.logprobs.clone().requires_grad_()).loss(EVERYTHING, batch.denominators())
    assert not any(number.requires_grad for pair in metrics.values() for number in pair if isinstance(number, Tensor))


@pytest.mark.parametrize(
    ("change", "config", "named"),
    [
        ({"reference_logprobs": None}, Objective(beta=0.1), "reference_logprobs, which is None"),
        ({"entropy": None}, Objective(entropy_coefficient=0.1), "entropy, which is None"),
        ({"old_logprobs": None}, Objective(), "old_logprobs, which is None"),
        ({"advantages": torch.ones(2)}, Objective(), r"advantages has the shape \[2\]"),
        ({"lags": None}, Objective(proximal_policy="log_linear"), "lags, which is None"),
        ({"positive": None}, Objective(positive_nll_weight=0.1), "positive, which is None"),
        ({}, Objective("ppo"), "loss_type is 'ppo'"),
        ({}, Objective(ratio_level="group"), "ratio_level is 'group': choose one of token, sequence"),
        ({}, Objective("dr_grpo"), "positive constant"),
    ],
)
def test_unusable_input_is_refused(change: dict[str, Any], config: Objective, named: str) -> None:
    with pytest.raises(ObjectiveError, match=named):
        replace(Batch.draw([3]), **change).loss(config)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_order_of_tokens_of_different_sequences_does_not_matter(loss_type: str) -> None:
    batch = Batch.draw([3, 1, 4, 2])
    config = replace(EVERYTHING, loss_type=loss_type)
    expected, gradient, _ = batch.value_and_gradient(config, batch.denominators())
    order = torch.argsort(torch.arange(10) % 4, stable=True)
    mixed = batch.select(order)
    for ids in (mixed.sequence_ids, mixed.sequence_ids * 10**9 - 5):
        loss, mixed_gradient, _ = replace(mixed, sequence_ids=ids).value_and_gradient(config, batch.denominators())
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(mixed_gradient, gradient[order])


@pytest.mark.parametrize("limit", [1, 4, 6, 100])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_blocks_of_any_size_give_the_same(loss_type: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, config = Batch.draw([3, 1, 5, 2, 2]), replace(EVERYTHING, loss_type=loss_type)
    loss, gradient, metrics = batch.value_and_gradient(config, batch.denominators())
    monkeypatch.setattr(blocks, "CPU_BLOCK_TOKENS", limit)
    flat = blocks.Flat.of({}, batch.mask, batch.sequence_ids)
    assert [rows.stop for rows in flat.blocks()][:2] == {1: [3, 4], 4: [4, 9], 6: [4, 9], 100: [13]}[limit]
    again, gradient_again, metrics_again = batch.value_and_gradient(config, batch.denominators())
    torch.testing.assert_close(again, loss)
    torch.testing.assert_close(gradient_again, gradient)
    for name, pair in metrics.items():
        assert [float(value) for value in metrics_again[name]] == pytest.approx([float(value) for value in pair])


def test_call_without_tokens_is_zero() -> None:
    loss, gradient, _ = Batch.draw([2]).select(torch.zeros(0, dtype=torch.int64)).value_and_gradient(EVERYTHING)
    assert loss == 0 and gradient.shape == (0,)


def test_value_without_a_gradient_is_the_same() -> None:
    batch = Batch.draw([3, 2])
    with torch.no_grad():
        loss, _ = batch.loss(EVERYTHING)
    assert loss == batch.value_and_gradient(EVERYTHING)[0]


def test_half_precision_gets_its_gradient_back_in_half_precision() -> None:
    batch = Batch.draw([3, 2], dtype=torch.bfloat16)
    loss, gradient, _ = batch.value_and_gradient(EVERYTHING)
    assert loss.dtype == torch.float32 and gradient.dtype == torch.bfloat16 and gradient.any()


def test_behaviour_as_proximal_policy_is_plain_ppo_on_the_engines_logprobs() -> None:
    batch = Batch.draw([3, 4])
    behaviour = Objective(proximal_policy="behaviour", importance_correction="token")
    same = replace(batch, old_logprobs=batch.behaviour_logprobs).value_and_gradient(Objective())
    for old in (batch.old_logprobs, None):
        loss, gradient, metrics = replace(batch, old_logprobs=old).value_and_gradient(behaviour)  # type: ignore[arg-type]
        torch.testing.assert_close((loss, gradient), same[:2])
        assert float(metrics["importance_weight"][0]) == float(batch.mask.sum())
        assert float(metrics["gen_kl_error"][0]) > 0


def test_log_linear_proximal_policy_lies_where_the_lag_says() -> None:
    batch = Batch.draw([2, 2, 2])
    current = batch.logprobs
    share = 1 / (batch.lags + 1)
    proximal = share * batch.behaviour_logprobs + (1 - share) * current
    expected = replace(batch, old_logprobs=proximal).value_and_gradient(Objective(importance_correction="token"))
    config = Objective(proximal_policy="log_linear", importance_correction="token")
    measured = replace(batch, old_logprobs=None).value_and_gradient(config)  # type: ignore[arg-type]
    torch.testing.assert_close(measured[:2], expected[:2])


def test_geometric_weight_is_the_mean_of_a_sequence() -> None:
    batch = replace(Batch.draw([4, 3]), mask=torch.ones(7))
    _, metrics = batch.loss(Objective(importance_correction="geometric", importance_cap=9.0))
    log_weight = batch.old_logprobs - batch.behaviour_logprobs
    expected = sum(len(part) * part.mean().exp() for part in log_weight.split([4, 3]))
    assert float(metrics["importance_weight"][0]) == pytest.approx(float(expected))


def test_sequence_ratio_can_be_had_with_the_mean_of_tokens() -> None:
    batch = replace(Batch.draw([4, 3]), mask=torch.ones(7))
    loss, _ = batch.loss(Objective("dapo", ratio_level="sequence", epsilon=9.0))
    ratio = torch.cat(
        [part.mean().exp().expand(len(part)) for part in (batch.logprobs - batch.old_logprobs).split([4, 3])]
    )
    assert float(loss) == pytest.approx(float((-batch.advantages * ratio).mean()))
    token, gspo = Objective("gspo", ratio_level="token"), Objective("grpo")
    torch.testing.assert_close(batch.loss(token)[0], batch.loss(gspo)[0])


def test_sequence_on_which_engine_and_trainer_disagree_gets_no_gradient() -> None:
    batch = replace(Batch.draw([3, 3]), mask=torch.ones(6, dtype=torch.bool))
    batch = replace(batch, behaviour_logprobs=batch.old_logprobs.clone())
    batch.behaviour_logprobs[4] -= 3.0
    _, gradient, metrics = batch.value_and_gradient(Objective(sequence_error_threshold=2.0), batch.denominators())
    _, unmasked, _ = batch.value_and_gradient(Objective(), batch.denominators())
    assert torch.equal(gradient[:3], unmasked[:3]) and not gradient[3:].any()
    assert float(metrics["sequence_error"][0]) == pytest.approx(1 + (2 + math.exp(3)) / 3)
    assert (int(metrics["sequence_error_masked"][0]), metrics["sequence_error_masked"][1]) == (1, 2)


def test_rewarded_rollouts_are_made_likelier() -> None:
    batch = replace(Batch.draw([3, 3, 2]), mask=torch.ones(8), advantages=torch.zeros(8, dtype=torch.float64))
    batch = replace(batch, positive=batch.sequence_ids != 1)
    loss, gradient, metrics = batch.value_and_gradient(Objective(positive_nll_weight=0.5))
    assert float(loss) == pytest.approx(-0.5 * float(batch.logprobs[batch.positive].mean()))
    torch.testing.assert_close(gradient, torch.where(batch.positive, -0.5 / 5, 0.0).double())
    assert int(metrics["positive_nll"][1]) == 5


@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3"])
def test_kl_in_the_reward_is_paid_by_the_tokens_before_it(kl_type: str) -> None:
    batch = replace(Batch.draw([2, 3]), mask=torch.ones(5))
    config = Objective("reinforce", beta=0.5, kl_type=kl_type, kl_placement="reward")
    x = batch.reference_logprobs - batch.old_logprobs
    estimate = {"k1": -x, "k2": x.square() / 2, "k3": x.exp() - 1 - x}[kl_type]
    to_go = torch.cat([part.flip(0).cumsum(0).flip(0) for part in estimate.split([2, 3])])
    _, gradient, _ = batch.value_and_gradient(config)
    torch.testing.assert_close(gradient, -(batch.advantages - 0.5 * to_go) / 5)


def test_kl_of_the_current_policy_at_samples_of_the_engines() -> None:
    batch = replace(Batch.draw([6]), mask=torch.ones(6), advantages=torch.zeros(6, dtype=torch.float64))
    config = Objective(beta=1.0, kl_type="k1", kl_importance_weight=True)
    loss, gradient, _ = batch.value_and_gradient(config)
    kappa, log_ratio = (batch.logprobs - batch.behaviour_logprobs).exp(), batch.logprobs - batch.reference_logprobs
    torch.testing.assert_close(loss, (kappa * log_ratio).mean())
    torch.testing.assert_close(gradient, kappa * (log_ratio + 1) / 6)


def test_kl_weight_that_is_not_finite_counts_as_zero() -> None:
    batch = replace(Batch.draw([3]), mask=torch.ones(3), advantages=torch.zeros(3, dtype=torch.float64))
    batch.behaviour_logprobs[1] = -math.inf
    loss, gradient, _ = batch.value_and_gradient(Objective("reinforce", beta=1.0, kl_importance_weight=True))
    assert loss.isfinite() and gradient.ne(0).tolist() == [True, False, True]


@pytest.mark.parametrize("proximal", ["recomputed", "behaviour"])
@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_gradient_with_everything_agrees_with_finite_differences(proximal: str, placement: str) -> None:
    # What is detached but follows the current policy, finite differences would see: so κ is current/behaviour here.
    batch = Batch.draw([3, 1, 4])
    config = replace(
        EVERYTHING,
        proximal_policy=proximal,
        kl_placement=placement,
        kl_importance_weight=True,
        importance_correction="geometric",
    )

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        return replace(batch, logprobs=logprobs, entropy=entropy).loss(config, batch.denominators())[0]

    inputs = batch.logprobs.clone().requires_grad_(), batch.entropy.clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, inputs, eps=1e-7, atol=1e-6)


@pytest.mark.parametrize("proximal", PROXIMAL)
def test_a_sequence_that_is_not_believed_is_as_good_as_not_there(proximal: str) -> None:
    batch = replace(Batch.draw([3, 3]), mask=torch.ones(6, dtype=torch.bool), positive=torch.ones(6, dtype=torch.bool))
    batch.behaviour_logprobs[:3] = batch.old_logprobs[:3] + 0.1
    batch.behaviour_logprobs[4] = math.nan
    config = replace(EVERYTHING, proximal_policy=proximal)
    value, gradient, metrics = batch.value_and_gradient(config, batch.denominators())
    alone = batch.select(torch.arange(3))
    expected, expected_gradient, expected_metrics = alone.value_and_gradient(config, batch.denominators())
    assert value == expected
    assert torch.equal(gradient, torch.cat([expected_gradient, torch.zeros(3, dtype=torch.float64)]))
    assert int(metrics["sequence_error_masked"][0]) == 1
    assert metrics["positive_nll"] == expected_metrics["positive_nll"]


def test_a_graph_that_is_kept_gives_its_gradient_again() -> None:
    logprobs = Batch.draw([3, 4]).logprobs.requires_grad_()
    loss, _ = replace(Batch.draw([3, 4]), logprobs=logprobs).loss(Objective("grpo"))
    first, second = (torch.autograd.grad(3 * loss, logprobs, retain_graph=True)[0] for _ in range(2))
    (once,) = torch.autograd.grad(loss, logprobs)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, 3 * once)


@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
@pytest.mark.parametrize("far", [-1.0, 1.0])
def test_nothing_is_held_where_there_is_no_advantage(loss_type: str, far: float) -> None:
    batch = Batch.draw([4])
    batch = replace(batch, logprobs=batch.old_logprobs + far, advantages=torch.zeros(4, dtype=torch.float64))
    _, _, metrics = batch.value_and_gradient(Objective(loss_type))
    assert [float(metrics[f"clip_ratio/{side}"][0]) for side in ("low", "high", "region")] == [0, 0, 0]
    assert batch.extremes(Objective(loss_type))["clip_ratio/high_max"] == 0
