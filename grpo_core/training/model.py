"""The policy as the trainer sees it: a transformers model, sharded with FSDP2, that answers log-probs.

Contract: `Policy.forward` returns the log-prob and entropy of given next tokens at the sampling temperature, without
ever holding float32 logits of the whole vocabulary. Master weights are float32; computation runs in `model.dtype`.
Nothing in it is random: two forward passes of the same weights give the same log-probs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo_core.objective.logprobs import token_logprobs
from grpo_core.training.attention import NAME, Packing
from grpo_core.training.batch import Batch
from grpo_core.training.lora import add_adapters

if TYPE_CHECKING:
    from grpo_core.config import RunConfig

# What a layer may do with the tokens before it. Others carry a state along the row, across its sequences.
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
# Two sequences of so many tokens are scored at load. What is computed alike differs by 1e-5 nats in float32; what is
# not has differed by 0.02 nats and more. The mean is what counts,
# since one token may be sent to another expert by rounding.
CHECKED_TOKENS = 16
CHECKED_NATS = 0.005


class PolicyError(ValueError):
    """A model that cannot be trained as asked."""


class Scores(NamedTuple):
    """What the policy says about given next tokens. `logprobs` and `entropy` are [predictions], in nats;
    `router_logits` holds [tokens, experts] of each layer with experts, where they were asked for."""

    logprobs: Tensor
    entropy: Tensor
    router_logits: tuple[Tensor, ...] = ()


class Policy(nn.Module):
    """A causal language model that scores packed sequences. `router_logits`: also answer those."""

    def __init__(self, language_model: PreTrainedModel, temperature: float, *, router_logits: bool = False) -> None:
        super().__init__()
        self.language_model: PreTrainedModel = language_model
        self._temperature = temperature
        self._logit_scale = logit_scale(language_model.config)
        self._softcap = getattr(language_model.config, "final_logit_softcapping", None)
        self._asks = {"output_router_logits": True} if router_logits else {}

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        packing: Packing,
        *,
        at: Tensor,
        targets: Tensor,
        temperature: float | None = None,
    ) -> Scores:
        """Scores of `targets` after the tokens at flat positions `at`.

        input_ids and position_ids are [1, tokens]; positions restart with every sequence. `temperature` None: the
        sampling temperature.
        """
        decoder, head = self.language_model.base_model, self.language_model.get_output_embeddings()
        output = decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False, packing=packing, **self._asks)
        logprobs, entropy = token_logprobs(
            output.last_hidden_state[0].index_select(0, at),
            head.weight,
            targets,
            temperature=temperature or self._temperature,
            logit_scale=self._logit_scale,
            softcap=self._softcap,
        )
        return Scores(logprobs, entropy, tuple(output.router_logits) if self._asks else ())


def scores_of(policy: Policy, batch: Batch) -> Scores:
    """The policy's scores of a batch's targets."""
    scores: Scores = policy(batch.input_ids, batch.position_ids, batch.packing, at=batch.at, targets=batch.targets)
    return scores


@torch.no_grad()
def logprobs_of(policy: Policy, batch: Batch) -> Tensor:
    """The log-probs of a batch's targets, [predictions], without a gradient; a collective of all ranks."""
    logprobs = scores_of(policy, batch).logprobs
    # Without a backward pass the root's parameters would stay gathered and be mistaken for the shards.
    policy.reshard()  # type: ignore[operator]
    return logprobs


def load_policy(directory: Path, config: RunConfig, *, mesh: DeviceMesh) -> Policy:
    """The policy of a Hugging Face directory, sharded over `mesh` layer by layer. Raises PolicyError."""
    language_model = load_language_model(directory, torch.float32)
    check_scores(language_model)
    routed = config.model.router_aux_loss_coefficient > 0
    if routed and getattr(language_model.config, "num_experts_per_tok", None) is None:
        raise PolicyError(
            f"model.router_aux_loss_coefficient={config.model.router_aux_loss_coefficient:g} balances experts, but the "
            f"{language_model.config.model_type} model in {directory} has none; set it to 0"
        )
    if config.model.lora is not None:
        add_adapters(language_model, config.model.lora, seed=config.seed)
    if config.training.activation_checkpointing:
        language_model.gradient_checkpointing_enable({"use_reentrant": False})
        # A layer checkpoints only in training mode; what is inside it stays as it is, so no dropout comes to life.
        for layer in layers_of(language_model):
            layer.training = True
    policy = Policy(language_model, config.sampling.temperature, router_logits=routed)
    return shard(policy, config, mesh=mesh)


def load_language_model(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of a directory, with attention over packed sequences. Raises PolicyError."""
    try:
        language_model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation=NAME, local_files_only=True
        )
    except KeyError as error:
        if error.args != (NAME,):
            raise
        raise PolicyError(f"the model in {directory} has attention of its own kind; choose another model") from error
    kinds = set(getattr(language_model.config, "layer_types", None) or ())
    if foreign := sorted(kinds - ATTENTION_LAYERS):
        raise PolicyError(
            f"the {language_model.config.model_type} model in {directory} has layers of the kind {foreign[0]}, which would "
            "leak from one packed sequence into the next; choose a model of full or sliding attention"
        )
    return language_model


def logit_scale(config: Any) -> float:
    """What the model multiplies its logits by: some families name the factor, some the divisor."""
    return float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)


@torch.no_grad()
def check_scores(language_model: PreTrainedModel) -> None:
    """Raise PolicyError unless two packed sequences are scored as the model scores them by itself, each alone. On the
    CPU, before anything is sharded.

    A family may do with its logits, its attention or its layers what is done nowhere else. Here that shows.
    """
    named = f"the {language_model.config.model_type} model in {language_model.name_or_path}"
    layers_of(language_model)
    head = language_model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, nn.Linear) or head.bias is not None:
        kind = type(head).__name__ if not isinstance(head, nn.Linear) else "linear layer with a bias"
        raise PolicyError(f"{named} has a {kind} as its output head; choose a model whose head is one matrix")
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(len(head.weight), (2, CHECKED_TOKENS), generator=draw)
    places = torch.arange(ids.numel()).view_as(ids)
    try:
        ours, _, _ = Policy(language_model, 1.0)(
            ids.view(1, -1),
            (places % CHECKED_TOKENS).view(1, -1),
            Packing.of([CHECKED_TOKENS] * 2, ids.device),
            at=places[:, :-1].flatten(),
            targets=ids[:, 1:].flatten(),
        )
        with _own_attention(language_model):
            logits = language_model(input_ids=ids, use_cache=False).logits[:, :-1]
    except TypeError as error:
        raise PolicyError(f"{named} does not take packed sequences ({error}); choose another model") from error
    theirs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).flatten()
    difference = float((ours - theirs).abs().mean())
    if not difference <= CHECKED_NATS:
        raise PolicyError(
            f"the trainer would compute other log-probs than {named} itself, by {difference:.2g} nats a token: its layers "
            "or its head do what the trainer does not know; choose another model"
        )


@contextmanager
def _own_attention(language_model: PreTrainedModel) -> Iterator[None]:
    """The model with its own attention, for the time of the block."""
    language_model.set_attn_implementation("eager")
    try:
        yield
    finally:
        language_model.set_attn_implementation(NAME)


def shard(policy: Policy, config: RunConfig, *, mesh: DeviceMesh) -> Policy:
    """Shard the policy over the mesh, in place. Parameters keep their dtype.

    It comes on the CPU, or already on the mesh's device. `fully_shard` moves what one call shards and keeps this rank's
    part, so that the device holds one whole layer at a time beside its shards, or beside nothing with cpu_offload.
    """
    dtype, master = getattr(torch, config.model.dtype), next(policy.parameters()).dtype
    lower = master.itemsize > dtype.itemsize and config.model.dtype != "float32"
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=master) if lower else MixedPrecisionPolicy()
    offload = (
        CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if config.training.cpu_offload else OffloadPolicy()
    )
    for layer in layers_of(policy.language_model):
        if config.training.torch_compile:
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=offload)
    fully_shard(policy, mesh=mesh, mp_policy=precision, offload_policy=offload)
    assert isinstance(policy, FSDPModule)
    return policy


def layers_of(language_model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers. Raises PolicyError for a family that keeps them elsewhere."""
    layers = getattr(language_model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise PolicyError(
            f"the {language_model.config.model_type} model in {language_model.name_or_path} has no list of decoder layers "
            "called `layers`; choose a model that is built like Llama"
        )
    return layers
