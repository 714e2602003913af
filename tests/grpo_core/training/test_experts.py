"""The imbalance of a router is that of each sequence, whatever shares its row."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from grpo_core.training.experts import load_imbalance


def logits(layers: int, tokens: int, experts: int = 5) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(tokens, experts, dtype=torch.float64, requires_grad=True) for _ in range(layers)]


def test_one_sequence_and_one_layer_give_the_usual_loss() -> None:
    (layer,) = logits(1, 12)
    found = load_imbalance([layer], torch.arange(12), torch.tensor([12]), experts_per_token=2)
    expected = load_balancing_loss_func((layer,), num_experts=5, top_k=2)
    torch.testing.assert_close(found[0], expected.to(found.dtype))
    torch.testing.assert_close(
        torch.autograd.grad(found[0], layer, retain_graph=True), torch.autograd.grad(expected, layer)
    )


def test_sequences_do_not_see_each_other_and_may_share_tokens() -> None:
    layers = logits(3, 10)
    together = load_imbalance(
        layers, torch.tensor([0, 1, 2, 3, 0, 1, 4, 5, 6]), torch.tensor([4, 5]), experts_per_token=2
    )
    for number, tokens in enumerate(([0, 1, 2, 3], [0, 1, 4, 5, 6])):
        alone = load_imbalance(layers, torch.tensor(tokens), torch.tensor([len(tokens)]), experts_per_token=2)
        torch.testing.assert_close(together[number], alone[0])


def test_an_even_load_has_the_least_imbalance() -> None:
    even = 10 * torch.eye(4)
    one = torch.zeros(4, 4)
    one[:, 0] = 10
    tokens, lengths = torch.arange(4), torch.tensor([4])
    torch.testing.assert_close(load_imbalance([even], tokens, lengths, experts_per_token=1), torch.ones(1))
    assert load_imbalance([one], tokens, lengths, experts_per_token=1) > 3.9


def test_two_experts_a_token_by_hand() -> None:
    """Of four experts the first two are sent everything: shares 1, 1, 0, 0 and mean probabilities .4, .4, .1, .1, so
    4 · (.4 + .4) = 3.2; with the third and fourth taking turns with them, shares and probabilities are even: 4 · 4 · ½
    · ¼ = 2, the number of experts per token."""
    uneven, other = [0.4, 0.4, 0.1, 0.1], [0.1, 0.1, 0.4, 0.4]
    for rows, expected in (([uneven, uneven], 3.2), ([uneven, other], 2.0)):
        logits = torch.tensor(rows, dtype=torch.float64).log()
        found = load_imbalance([logits], torch.arange(2), torch.tensor([2]), experts_per_token=2)
        torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float64))
