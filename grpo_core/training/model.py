"""The policy as the trainer sees it: a transformers model, sharded with FSDP2, that answers log-probs.

Contract: `Policy.forward` returns the log-prob and entropy of given next tokens at the sampling temperature, without
ever holding float32 logits of the whole vocabulary. Master weights are float32; computation runs in `model.dtype`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo_core.objective.logprobs import token_logprobs
from grpo_core.training.attention import NAME, Packing


class Policy(nn.Module):
    """A causal language model that scores packed sequences."""

    def __init__(self, language_model: PreTrainedModel, temperature: float) -> None:
        super().__init__()
        self.language_model: PreTrainedModel = language_model
        self._temperature = temperature
        config = language_model.config
        self._logit_scale = float(getattr(config, "logit_scale", None) or 1.0)
        self._softcap = getattr(config, "final_logit_softcapping", None)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        packing: Packing,
        *,
        at: Tensor,
        targets: Tensor,
        temperature: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy, each [predictions], of `targets` after the tokens at flat positions `at`.

        input_ids and position_ids are [1, tokens]; positions restart with every sequence. `temperature` None: the
        sampling temperature.
        """
        decoder, head = self.language_model.base_model, self.language_model.get_output_embeddings()
        hidden = decoder(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, packing=packing
        ).last_hidden_state[0]
        return token_logprobs(
            hidden.index_select(0, at),
            head.weight,
            targets,
            temperature=temperature or self._temperature,
            logit_scale=self._logit_scale,
            softcap=self._softcap,
        )


def load_policy(
    directory: Path, *, dtype: torch.dtype, temperature: float, mesh: DeviceMesh, activation_checkpointing: bool
) -> Policy:
    """Load a Hugging Face directory and shard it over `mesh`, layer by layer."""
    language_model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation=NAME, local_files_only=True
    )
    if activation_checkpointing:
        language_model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = Policy(language_model, temperature).to(torch.device(mesh.device_type))
    precision = MixedPrecisionPolicy(param_dtype=None if dtype is torch.float32 else dtype, reduce_dtype=torch.float32)
    layers: nn.ModuleList = language_model.base_model.layers  # type: ignore[assignment]
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    assert isinstance(policy, FSDPModule)
    return policy
