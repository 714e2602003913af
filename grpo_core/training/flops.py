"""How much arithmetic a step is, and what share of the machine's peak that makes.

Counted are the products of matrices that the model itself asks for, at two operations per multiply-add: the layers of
every token, the attention of every pair that is seen, the output head of every prediction. The backward pass makes two
products of each: the gradient of what came in, and that of the other factor, which a frozen weight does not need. What
a trainer does beyond that (recomputed activations, the projection done again for fused log-probs) is not counted, as
usual for model FLOPs utilisation (Chowdhery et al. 2022, appendix B).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

# Dense bfloat16 products per second with float32 sums, as the makers' data sheets give them, by a part of the name.
PEAKS = {
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that decide the arithmetic. `intermediate` is what one token passes through, all its experts together;
    `adapters` are the weights of all adapters, which multiply every token:
    where there are any, only they are trained."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_width: int
    intermediate: int
    vocabulary: int
    router: int = 0
    adapters: int = 0

    @classmethod
    def of(cls, config: Any, *, adapters: int = 0) -> ModelShape:
        """From a transformers config of a decoder with gated feed-forward layers, with or without experts."""
        heads, experts = config.num_attention_heads, getattr(config, "num_experts_per_tok", None)
        intermediate = config.intermediate_size
        if experts:
            intermediate = experts * (getattr(config, "moe_intermediate_size", None) or intermediate)
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_width=getattr(config, "head_dim", None) or config.hidden_size // heads,
            intermediate=intermediate,
            vocabulary=config.vocab_size,
            router=int(getattr(config, "num_experts", None) or config.num_local_experts) if experts else 0,
            adapters=adapters,
        )

    @property
    def per_token(self) -> int:
        """Weights that multiply one token in all layers."""
        attention = 2 * self.hidden * self.head_width * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate + self.hidden * self.router)

    @property
    def per_pair(self) -> int:
        """Multiply-adds of one query looking at one key in all layers: score and value."""
        return self.layers * self.heads * self.head_width * 2


def forward_flops(shape: ModelShape, lengths: Iterable[int], predictions: int) -> float:
    """Operations of one forward pass over sequences of these lengths that predicts so many tokens."""
    return sum(_forward(shape, lengths, predictions))


def step_flops(shape: ModelShape, lengths: Iterable[int], predictions: int, *, scored: float = 0.0) -> float:
    """Operations of a training step. `scored`: forward passes without a gradient, as a multiple of the whole step: 1
    for a reference model, (n - 1) / n for the old log-probs of n updates."""
    weights, rest = _forward(shape, lengths, predictions)
    return (1 + scored) * (weights + rest) + (1 if shape.adapters else 2) * weights + 2 * rest


def _forward(shape: ModelShape, lengths: Iterable[int], predictions: int) -> tuple[float, float]:
    """Operations of a forward pass: (with the weights of the model, with its adapters and of pairs of tokens)."""
    lengths = list(lengths)
    tokens, pairs = sum(lengths), sum(length * (length + 1) // 2 for length in lengths)
    weights = tokens * shape.per_token + predictions * shape.hidden * shape.vocabulary
    return 2.0 * weights, 2.0 * (tokens * shape.adapters + pairs * shape.per_pair)


@dataclass(frozen=True, slots=True)
class Machine:
    """What trains what. `peak_flops` is that of one of `devices` devices, None when it is not known."""

    shape: ModelShape
    devices: int
    peak_flops: float | None


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Shares of the peak: over the whole wall time, waiting included, and over the time that the step itself took."""

    of_wall: float
    of_busy: float


def utilisation(
    flops: float, *, wall_seconds: float, busy_seconds: float, peak_flops: float, devices: int
) -> Utilisation:
    """Model FLOPs utilisation with both denominators. `peak_flops` is that of one of `devices` devices."""
    peak = peak_flops * devices
    return Utilisation(flops / (wall_seconds * peak), flops / (busy_seconds * peak))


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 peak of one GPU, by the name that it reports; None when it is not known."""
    return next((peak for name, peak in PEAKS.items() if name in device_name), None)


def machine_of(config: Any, device: torch.device, devices: int, *, adapters: int = 0) -> Machine | None:
    """What trains a model of this transformers config with so many `adapters` (weights of them); None for an
    architecture whose arithmetic is not known."""
    try:
        shape = ModelShape.of(config, adapters=adapters)
    except AttributeError:
        return None
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return Machine(shape, devices, peak)
