"""What the loss reads: the settings of the run config, and what a whole step divides by.

Contract: settings are checked before anything is computed; an unknown word is an error, not a default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

LossType = Literal["grpo", "dapo", "dr_grpo", "bnpo", "gspo", "cispo", "reinforce"]
RatioLevel = Literal["token", "sequence"]
ProximalPolicy = Literal["recomputed", "behaviour", "log_linear"]
KLType = Literal["k1", "k2", "k3"]
KLPlacement = Literal["loss", "reward"]
ImportanceCorrection = Literal["none", "token", "sequence", "geometric"]
ImportanceMode = Literal["truncate", "band", "mask"]
KNOWN = {
    "loss_type": get_args(LossType),
    "ratio_level": (None, *get_args(RatioLevel)),
    "proximal_policy": get_args(ProximalPolicy),
    "kl_type": get_args(KLType),
    "kl_placement": get_args(KLPlacement),
    "importance_correction": get_args(ImportanceCorrection),
    "importance_mode": get_args(ImportanceMode),
}


class ObjectiveError(ValueError):
    """Inputs or settings from which no loss can be computed."""


class ObjectiveSettings(Protocol):
    """What the loss reads from the run config.

    `loss_type`, `ratio_level`: see losses.py. Ratios are clipped to [1 - epsilon, 1 + epsilon_high] (None: epsilon).
    `dual_clip`: largest loss per unit of negative advantage (Ye et al. 2020), above 1; None: unbounded.
    `proximal_policy`, `importance_correction`, `importance_mode`, `sequence_error_threshold`: see importance.py.
    `kl_type`, `kl_placement`, `kl_importance_weight`: see kl.py; the log-ratio of the KL term is clamped to
    ±`kl_input_clamp`, its value to ±`kl_output_clamp`. `force_on_policy_ratio`: take the current policy for the old
    one. `positive_nll_weight`: weight of the mean negative log-prob of rewarded rollouts (VAPO, Yue et al. 2025).
    """

    @property
    def loss_type(self) -> str: ...
    @property
    def ratio_level(self) -> str | None: ...
    @property
    def epsilon(self) -> float: ...
    @property
    def epsilon_high(self) -> float | None: ...
    @property
    def dual_clip(self) -> float | None: ...
    @property
    def proximal_policy(self) -> str: ...
    @property
    def force_on_policy_ratio(self) -> bool: ...
    @property
    def beta(self) -> float: ...
    @property
    def kl_type(self) -> str: ...
    @property
    def kl_placement(self) -> str: ...
    @property
    def kl_importance_weight(self) -> bool: ...
    @property
    def kl_input_clamp(self) -> float: ...
    @property
    def kl_output_clamp(self) -> float: ...
    @property
    def entropy_coefficient(self) -> float: ...
    @property
    def positive_nll_weight(self) -> float: ...
    @property
    def importance_correction(self) -> str: ...
    @property
    def importance_mode(self) -> str: ...
    @property
    def importance_cap(self) -> float: ...
    @property
    def importance_floor(self) -> float | None: ...
    @property
    def sequence_error_threshold(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Denominators:
    """What the sums of a whole optimizer step, all ranks and micro-batches, are divided by.

    `tokens`: trained tokens; `sequences`: sequences with at least one; `constant`: for dr_grpo, the sequences times the
    generated tokens that a rollout may have; `positive_tokens`:
    trained tokens of rewarded rollouts, for positive_nll_weight.
    """

    tokens: float
    sequences: float
    constant: float = 0.0
    positive_tokens: float = 0.0


def needs_old_policy(config: ObjectiveSettings) -> bool:
    """Whether the loss reads the trainer's own log-probs at the start of the step."""
    return config.proximal_policy == "recomputed" and not config.force_on_policy_ratio


def check_settings(config: ObjectiveSettings, denominators: Denominators | None) -> None:
    """Raise ObjectiveError for an unknown word, or dr_grpo without its constant."""
    for name, known in KNOWN.items():
        if getattr(config, name) not in known:
            words = ", ".join(word for word in known if word is not None)
            raise ObjectiveError(f"{name} is {getattr(config, name)!r}: choose one of {words}")
    if config.loss_type == "dr_grpo" and (denominators is None or denominators.constant <= 0):
        raise ObjectiveError(
            "dr_grpo divides by the sequences of the step times the generated tokens that a rollout may have: "
            "pass denominators with a positive constant"
        )
