"""The reference that the KL term holds the policy to: version 0, frozen.

Contract: a `Reference` gives the log-probs of a batch's targets, [predictions], without a gradient, at the sampling
temperature; a collective of all ranks. With adapters it is the policy without them and costs no memory; otherwise it
is a second copy, sharded like the policy, in the precision of the computation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from grpo_core.training.batch import Batch
from grpo_core.training.lora import without_adapters
from grpo_core.training.model import Policy, load_language_model, logprobs_of, shard

if TYPE_CHECKING:
    from grpo_core.config import RunConfig

Reference = Callable[[Batch], Tensor]


def load_reference(directory: Path, config: RunConfig, policy: Policy, *, mesh: DeviceMesh) -> Reference | None:
    """The reference of a policy whose version 0 lies in `directory`; None when no KL term asks for one."""
    if config.objective.beta == 0:
        return None
    if config.model.lora is not None:
        return partial(_logprobs_without_adapters, policy)
    language_model = load_language_model(directory, getattr(torch, config.model.dtype))
    language_model.requires_grad_(False)
    return partial(logprobs_of, shard(Policy(language_model, config.sampling.temperature), config, mesh=mesh))


def _logprobs_without_adapters(policy: Policy, batch: Batch) -> Tensor:
    with without_adapters(policy):
        return logprobs_of(policy, batch)
