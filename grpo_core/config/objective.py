"""The loss: which surrogate, which ratio, which corrections."""

from __future__ import annotations

from pydantic import Field, model_validator

from grpo_core.config.section import Section
from grpo_core.objective.settings import (
    ImportanceCorrection,
    ImportanceMode,
    KLPlacement,
    KLType,
    LossType,
    ProximalPolicy,
    RatioLevel,
)

# Said of what only bounds a ratio that can differ from 1.
NO_RATIO = "Matters where the ratio is not 1: with several updates a step, or a proximal policy that is not recomputed"
NO_KL = "No effect while beta is 0"


class ObjectiveConfig(Section):
    """The loss."""

    loss_type: LossType = Field("dapo", description="Surrogate and normalisation; see grpo_core/objective/losses.py")
    ratio_level: RatioLevel | None = Field(
        None, description="Probability ratio of tokens or of sequences; default: of sequences for gspo, else of tokens"
    )
    epsilon: float = Field(
        0.2, ge=0, le=1, description=f"The probability ratio is clipped below at 1 − epsilon. {NO_RATIO}"
    )
    epsilon_high: float | None = Field(
        None,
        ge=0,
        le=1e6,
        description=f"The probability ratio is clipped above at 1 + this; default: epsilon. {NO_RATIO}",
    )
    dual_clip: float | None = Field(
        None, gt=1, le=1e6, description=f"Largest loss per unit of negative advantage. {NO_RATIO}"
    )
    proximal_policy: ProximalPolicy = Field(
        "recomputed",
        description="What the ratio compares with: the trainer's policy at the start of the step, the engine's, "
        "or a point between the engine's and the current one that the lag decides",
    )
    force_on_policy_ratio: bool = Field(
        False, description="Take the current policy for the old one, so that the ratio is 1 in every update"
    )
    beta: float = Field(
        0.0,
        ge=0,
        le=1e3,
        description="Weight of the KL divergence from version 0; above 0 that is loaded as reference model",
    )
    kl_type: KLType = Field("k3", description=f"Estimator of the KL term. {NO_KL}")
    kl_placement: KLPlacement = Field(
        "loss", description=f"The KL term is added to the loss, or subtracted from the advantages behind it. {NO_KL}"
    )
    kl_importance_weight: bool = Field(
        False,
        description="Weigh the KL term of the loss by current/behaviour, because the engine's policy drew the tokens. "
        f"{NO_KL}",
    )
    kl_input_clamp: float = Field(20.0, gt=0, le=80, description=f"Bound of the log-ratio in the KL term. {NO_KL}")
    kl_output_clamp: float = Field(10.0, gt=0, le=1e6, description=f"Bound of the KL term of one token. {NO_KL}")
    entropy_coefficient: float = Field(0.0, ge=0, le=1e3, description="Weight of the entropy bonus")
    positive_nll_weight: float = Field(
        0.0,
        ge=0,
        le=1e3,
        description="Weight of the mean negative log-prob of the tokens of rollouts with a reward above 0",
    )
    importance_correction: ImportanceCorrection = Field(
        "token",
        description="Corrects for the engine's older policy: not at all, per token, per sequence, "
        "or per sequence by the geometric mean of its tokens' weights; none where proximal_policy is behaviour, whose ratio corrects",
    )
    importance_mode: ImportanceMode = Field(
        "truncate",
        description="Weights outside floor and cap are clamped, their tokens masked, or their sequences masked",
    )
    importance_cap: float = Field(2.0, gt=0, le=1e6, description="Highest importance weight")
    importance_floor: float | None = Field(None, ge=0, le=1e6, description="Lowest importance weight; default: 0")
    sequence_error_threshold: float | None = Field(
        None,
        ge=1,
        le=1e6,
        description="A sequence whose mean factor between trainer's and engine's probabilities exceeds this trains nothing; "
        "1 is agreement; none: no sequence is",
    )
    acknowledge_no_correction: bool = Field(
        False, description="Allow a window above 0 without importance-sampling correction"
    )

    @model_validator(mode="after")
    def _floor_below_cap(self) -> ObjectiveConfig:
        if self.importance_floor is not None and self.importance_floor > self.importance_cap:
            raise ValueError(
                f"objective.importance_floor={self.importance_floor:g} is above objective.importance_cap={self.importance_cap:g}, "
                "so no weight is allowed; lower the floor or raise the cap"
            )
        return self

    @model_validator(mode="after")
    def _one_old_policy(self) -> ObjectiveConfig:
        if self.force_on_policy_ratio and self.proximal_policy != "recomputed":
            raise ValueError(
                f"objective.force_on_policy_ratio=true takes the current policy for the old one, but objective.proximal_policy={self.proximal_policy} "
                "names another; set one of the two back"
            )
        if self.proximal_policy == "behaviour" and self.loss_type == "reinforce" and not self.acknowledge_no_correction:
            raise ValueError(
                "objective.proximal_policy=behaviour corrects through the ratio, which objective.loss_type=reinforce does not have; "
                "set it to recomputed, or acknowledge with objective.acknowledge_no_correction=true"
            )
        return self

    @model_validator(mode="after")
    def _corrects_once(self) -> ObjectiveConfig:
        if self.proximal_policy == "behaviour" and self.importance_correction != "none":
            raise ValueError(
                f"objective.importance_correction={self.importance_correction} weighs proximal against behaviour policy, which "
                "objective.proximal_policy=behaviour makes the same; set it to none"
            )
        return self

    @model_validator(mode="after")
    def _nothing_without_effect(self) -> ObjectiveConfig:
        ignored = {
            "loss_type=reinforce": ("ratio_level", "epsilon", "epsilon_high", "dual_clip"),
            "loss_type=cispo": ("dual_clip",),
            "importance_correction=none": ("importance_mode", "importance_cap", "importance_floor"),
            "kl_placement=reward": ("kl_importance_weight",),
        }
        for setting, names in ignored.items():
            key, _, value = setting.partition("=")
            for name in names if getattr(self, key) == value else ():
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"objective.{name}={getattr(self, name)} has no effect with objective.{setting}; leave it out"
                    )
        return self

    @property
    def corrects(self) -> bool:
        """Whether the loss corrects for the policy that sampled: by a weight, or by its ratio."""
        return self.importance_correction != "none" or (
            self.proximal_policy == "behaviour" and self.loss_type != "reinforce"
        )
