"""What answers the policy between its turns: nothing, or one of several kinds of environment."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from grpo_core.config.section import Importable, PositiveInt, Section

# The source of reward that an environment is, beside the functions.
ENVIRONMENT_SOURCE = "environment"


class NoEnvironment(Section):
    """Rollouts end with the first answer that calls no tool."""

    kind: Literal["none"] = "none"


class EnvironmentSection(Section):
    """What every environment needs."""

    instances: PositiveInt = Field(256, description="Rollouts that are in an environment at the same time")
    timeout_seconds: float = Field(60, gt=0, le=1e9, description="Longest time for one reset, step, reward or close")
    reward_weight: float = Field(
        1.0, ge=-1e6, le=1e6, description="Factor of the environment's own reward, beside those of rewards.functions"
    )


class ReasoningGymEnvironment(EnvironmentSection):
    """reasoning-gym's own scorer as an environment; a wrong answer may be tried again."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    attempts: PositiveInt = Field(1, description="Answers one rollout may give; 1 is a single turn")
    solved_score: float = Field(1.0, gt=0, le=1, description="A score from here on ends the rollout")
    decay: float = Field(1.0, gt=0, le=1, description="Factor of the score for every attempt after the first")
    feedback: str = Field(
        "That is not right. Try again.", min_length=1, description="What the user says to an answer that is not solved"
    )


class PythonEnvironment(EnvironmentSection):
    """Environments made by a Python callable; see grpo_core/rollout/environments.py for what they must offer."""

    kind: Literal["python"] = "python"
    factory: Importable = Field(description="module:callable that makes one instance")
    arguments: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the factory")


class VerifiersEnvironment(EnvironmentSection):
    """An environment written for the library verifiers."""

    kind: Literal["verifiers"] = "verifiers"
    loader: Importable = Field(description="module:callable that loads the environment")
    arguments: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the loader")


class HttpEnvironment(EnvironmentSection):
    """Environments behind a URL; grpo_core/rollout/http_environment.py states the requests."""

    kind: Literal["http"] = "http"
    url: str = Field(pattern=r"^https?://\S+$", description="Where /reset, /step, /reward and /close are")
    attempts: PositiveInt = Field(4, description="Times one request is sent before it has failed")


EnvironmentConfig = Annotated[
    NoEnvironment | ReasoningGymEnvironment | PythonEnvironment | VerifiersEnvironment | HttpEnvironment,
    Field(discriminator="kind", description="What answers between the turns"),
]
