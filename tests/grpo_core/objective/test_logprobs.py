"""Tiled log-probs and entropy agree with the plain computation, gradients included, and never hold all logits."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_core.objective import logprobs, tiles
from grpo_core.objective.logprobs import LogprobError, token_logprobs

VARIANTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"logit_scale": 0.25},
    {"softcap": 3.0},
    {"temperature": 1.3, "logit_scale": 2.0, "softcap": 5.0},
]
TILES = [(4, 7), (100, 100), (1, 1), (5, 33)]


def plain(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    logits = logit_scale * hidden @ weight.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    distribution = torch.log_softmax(logits / temperature, dim=1)
    entropy = -(distribution.exp() * distribution).sum(dim=1)
    return distribution.gather(1, targets[:, None]).squeeze(1), entropy


def draw(tokens: int = 10, width: int = 6, vocab: int = 33, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator)
    return hidden, torch.randn(vocab, width, generator=generator), torch.randint(vocab, (tokens,), generator=generator)


def relative(measured: Tensor, expected: Tensor) -> float:
    return float((measured.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_values_and_gradients_agree_with_the_plain_computation(options: dict[str, Any], tile: tuple[int, int]) -> None:
    hidden, weight, targets = draw()
    results = []
    for cast, function, extra in ((torch.float64, plain, {}), (torch.float32, token_logprobs, {"tile": tile})):
        inputs = [tensor.to(cast).requires_grad_() for tensor in (hidden, weight)]
        logprobs, entropy = function(*inputs, targets, **options, **extra)
        slopes = torch.linspace(-1, 1, len(targets), dtype=cast)
        (logprobs * slopes + 0.3 * entropy * slopes.flip(0)).sum().backward()
        results.append((logprobs, entropy, inputs[0].grad, inputs[1].grad))
    expected, measured = results
    for place in (0, 1):
        torch.testing.assert_close(measured[place].double(), expected[place], rtol=0, atol=1e-5)
    for place in (2, 3):
        assert relative(measured[place], expected[place]) <= 1e-4


@contextmanager
def compiled_tiles(backend: str) -> Iterator[CompileCounterWithBackend]:
    """Tiles go the way of GPUs, `take` and `pull` traced as one graph each; what is counted are the graphs."""
    counter, real = CompileCounterWithBackend(backend), torch.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(real, backend=counter, fullgraph=True))
        patch.setattr(logprobs, "tiles_of", lambda hidden, head, _: tiles.CompiledTiles(hidden, head))
        torch._dynamo.reset()
        tiles._compiled.cache_clear()
        yield counter
        tiles._compiled.cache_clear()


def both_ways(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> list[Tensor]:
    """Values and gradients, that of the entropy included."""
    inputs = [tensor.detach().clone().requires_grad_() for tensor in (hidden, weight)]
    values = token_logprobs(*inputs, targets, **options)
    slopes = torch.linspace(-1, 1, len(targets))
    gradients = torch.autograd.grad(((values[0] + 0.3 * values[1]) * slopes).sum(), inputs)
    return [*(value.detach() for value in values), *gradients]


@pytest.mark.parametrize("options", [VARIANTS[0], VARIANTS[-1]], ids=str)
def test_compiled_tiles_agree_with_eager_ones(options: dict[str, Any]) -> None:
    inputs = draw(tokens=40, vocab=133)
    eager = both_ways(*inputs, tile=(16, 32), **options)
    with compiled_tiles("aot_eager") as counter:
        compiled = both_ways(*inputs, tile=(16, 32), **options)
    assert counter.frame_count
    for measured, expected in zip(compiled, eager, strict=True):
        torch.testing.assert_close(measured, expected, rtol=1e-5, atol=1e-6)


def test_nothing_is_compiled_again_for_other_sizes_or_numbers() -> None:
    with compiled_tiles("eager") as counter:
        for number, (tokens, vocab) in enumerate([(40, 133), (41, 130), (16, 70), (100, 77)]):
            both_ways(*draw(tokens, vocab=vocab), tile=(16, 32), temperature=1 + 0.1 * number, softcap=2.0 + number)
    assert counter.frame_count == 2


@pytest.mark.parametrize(("length", "size"), [(0, 4), (1, 4), (9, 4), (8193, 8192), (151_936, 8192), (150_000, 2048)])
def test_cuts_are_few_and_none_is_a_single_row(length: int, size: int) -> None:
    cuts = [(cut.start, cut.stop) for cut in logprobs._slices(length, size)]
    assert [index for start, stop in cuts for index in range(start, stop)] == list(range(length))
    assert len(cuts) == -(-length // size)
    if length > size > 64:
        assert all(64 <= stop - start <= size for start, stop in cuts)
        assert all(start % 64 == 0 for start, _ in cuts)


def test_gradient_agrees_with_finite_differences() -> None:
    hidden, weight, targets = draw(tokens=4, width=3, vocab=7)
    inputs = hidden.double().requires_grad_(), weight.double().requires_grad_()

    def function(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(hidden, weight, targets, temperature=0.8, softcap=4.0, tile=(3, 2))

    assert torch.autograd.gradcheck(function, inputs)


def test_large_logits_stay_finite() -> None:
    hidden, weight, targets = draw()
    logprobs, entropy = token_logprobs(hidden * 1e4, weight, targets, tile=(3, 4))
    expected, expected_entropy = plain(hidden.double() * 1e4, weight.double(), targets)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-2)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)


def test_half_precision_inputs_are_accumulated_in_float32() -> None:
    hidden, weight, targets = draw(width=64)
    halves = [tensor.bfloat16().requires_grad_() for tensor in (hidden, weight)]
    logprobs, _ = token_logprobs(*halves, targets, temperature=4.0, tile=(4, 8))
    expected, _ = plain(*(half.detach().double() for half in halves), targets, temperature=4.0)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    logprobs.sum().backward()
    assert all(half.grad is not None and half.grad.dtype == torch.bfloat16 for half in halves)


def test_frozen_weight_gets_no_gradient() -> None:
    hidden, weight, targets = draw()
    hidden.requires_grad_()
    token_logprobs(hidden, weight, targets)[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_entropy_alone_has_a_gradient() -> None:
    hidden, weight, targets = draw()
    inputs = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    token_logprobs(*inputs, targets, tile=(4, 7))[1].sum().backward()
    expected = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    plain(*expected, targets)[1].sum().backward()
    for measured, wanted in zip(inputs, expected, strict=True):
        torch.testing.assert_close(measured.grad, wanted.grad)


def test_a_head_of_higher_precision_than_its_input_is_used_as_it_is() -> None:
    hidden, weight, targets = draw()
    logprobs, _ = token_logprobs(hidden.bfloat16(), weight, targets)
    expected, _ = plain(hidden.bfloat16().double(), weight.double(), targets)
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=1e-5)


def test_certain_token_gets_an_exact_gradient() -> None:
    hidden, weight, targets = draw(tokens=1, width=4, vocab=16)
    hidden = 4 * weight[targets]
    measured, expected = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    token_logprobs(measured, weight, targets, tile=(1, 5))[0].sum().backward()
    plain(expected, weight.double(), targets)[0].sum().backward()
    assert measured.grad is not None and expected.grad is not None
    torch.testing.assert_close(measured.grad.double(), expected.grad, rtol=1e-3, atol=1e-6)


def sharded_head(rank: int, directory: str) -> None:
    """One of two ranks, each with half of the output matrix and tokens of its own; saves its half of the gradient."""
    dist.init_process_group(
        "gloo", f"file://{directory}/rendezvous", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    hidden, weight, targets = draw()
    head = distribute_tensor(weight[:32], init_device_mesh("cpu", (2,)), [Shard(0)]).requires_grad_()
    mine = slice(5 * rank, 5 * rank + 5)
    token_logprobs(hidden[mine], head, targets[mine] % 32)[0].sum().backward()
    torch.save(head.grad.to_local(), f"{directory}/{rank}")
    dist.destroy_process_group()


def test_sharded_head_is_gathered_and_its_gradient_is_the_mean_over_ranks(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(sharded_head, (str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call]
    hidden, weight, targets = draw()
    whole = weight[:32].clone().requires_grad_()
    token_logprobs(hidden, whole, targets % 32)[0].sum().backward()
    assert whole.grad is not None
    halves = [torch.load(tmp_path / str(rank), weights_only=True) for rank in range(2)]
    torch.testing.assert_close(torch.cat(halves), whole.grad / 2)


def test_no_tokens_give_empty_results() -> None:
    hidden, weight, targets = draw(tokens=0)
    logprobs, entropy = token_logprobs(hidden.requires_grad_(), weight, targets)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()


class LargestTensor(TorchDispatchMode):
    """Records the most elements that any operation produced."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_no_tensor_of_tokens_by_vocabulary_is_made() -> None:
    hidden, weight, targets = draw(tokens=64, width=4, vocab=256)
    hidden.requires_grad_()
    weight.requires_grad_()
    with LargestTensor() as largest:
        token_logprobs(hidden, weight, targets, tile=(16, 32))[0].sum().backward()
    assert largest.elements <= max(weight.numel(), 16 * 32) < 64 * 256


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"targets": torch.tensor([0, 33])}, "range from 0 to 33 but the vocabulary has 33"),
        ({"targets": torch.tensor([-100, 1])}, "range from -100"),
        ({"targets": torch.tensor([1])}, "do not match"),
        ({"weight": torch.zeros(33, 5)}, "do not match"),
        ({"temperature": 0.0}, "temperature 0.0"),
        ({"softcap": -1.0}, "softcap -1.0"),
        ({"tile": (0, 4)}, r"tile \(0, 4\)"),
    ],
)
def test_unusable_input_is_refused(change: dict[str, Any], named: str) -> None:
    hidden, weight, targets = draw(tokens=2)
    with pytest.raises(LogprobError, match=named):
        token_logprobs(**({"hidden": hidden, "weight": weight, "targets": targets} | change))
