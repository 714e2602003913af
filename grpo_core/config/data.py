"""The prompts: where they come from, and in which order."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from grpo_core.config.section import Importable, PositiveInt, Section


class ReasoningGymData(Section):
    """Tasks of the library reasoning-gym; the held-out split has its own seed
    and shares no question with the train split."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    task: str = Field("chain_sum", min_length=1, description="Name of the task in reasoning-gym")
    task_config: dict[str, Any] = Field(
        default_factory=dict, description="Settings of the task, as reasoning-gym names them"
    )
    size: PositiveInt = Field(2000, description="Questions of the train split")
    held_out_size: PositiveInt = Field(256, description="Questions of the held-out split")
    seed: int = Field(1, ge=0, le=2**53, description="Seed of the train split")
    held_out_seed: int = Field(
        1_000_000_000, ge=0, le=2**53, description="Far from `seed`: entry i is drawn with seed + i"
    )

    @model_validator(mode="after")
    def _splits_differ(self) -> ReasoningGymData:
        if self.seed == self.held_out_seed:
            raise ValueError(
                f"data.source.held_out_seed equals data.source.seed ({self.seed}): the held-out split would be the train split; choose another"
            )
        return self


class FileData(Section):
    """JSON Lines or Parquet files; every column but the prompt is handed to the reward functions."""

    kind: Literal["files"] = "files"
    path: Path = Field(description="File of the train split, .jsonl or .parquet")
    held_out_path: Path | None = Field(None, description="File of the held-out split; none: no evaluation data")
    prompt_column: str = Field(
        "prompt", description="A list of {role, content} messages, or plain text taken as one user message"
    )


class StreamData(Section):
    """A dataset without a known end, from a function that yields records. What it yields is recorded in the store ahead
    of its use, so that a resume finds every prompt again; the first pass goes in the order of the stream."""

    kind: Literal["stream"] = "stream"
    function: Importable = Field(
        description="module:function, called with skip=N and the arguments; yields the records after the first N as dicts",
    )
    arguments: dict[str, Any] = Field(default_factory=dict, description="Further arguments of the function; no secrets")
    prompt_column: str = Field(
        "prompt", description="A list of {role, content} messages, or plain text taken as one user message"
    )
    chunk_size: PositiveInt = Field(64, description="Prompts of one file of the record")
    held_out_path: Path | None = Field(None, description="File of the held-out split; none: no evaluation data")


class DataConfig(Section):
    """The prompts."""

    source: Annotated[
        ReasoningGymData | FileData | StreamData,
        Field(discriminator="kind", description="Where the prompts come from"),
    ] = ReasoningGymData()
    system_prompt: str | None = Field(None, description="Put before every conversation as a system message")
    seed: int = Field(0, ge=0, le=2**53, description="Seed of the permutation of each epoch")
    shuffle: bool = Field(True, description="Permute the prompts in each epoch; otherwise they come in their own order")
