"""Gathered weights are complete, full and named as in a checkpoint."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard

from grpo_core.refit.source import checkpoint_name, gather


class Policy(torch.nn.Module):
    """The parameter names of a language model, without the model."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed_tokens = torch.nn.Embedding(32, 8)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(2)])
        self.lm_head = torch.nn.Linear(8, 32, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight


@pytest.mark.parametrize("tied", [True, False])
def test_all_weights_are_there_once_with_the_head_even_when_tied(tied: bool) -> None:
    policy = Policy(tied)
    weights = gather(policy, dtype=torch.float32, device="cpu", keep=True)
    names = [name for name, _ in weights]
    assert len(set(names)) == len(names)
    assert set(names) == set(policy.state_dict())
    assert all(torch.equal(tensor, policy.state_dict()[name]) for name, tensor in weights)
    assert "lm_head.weight" in names


def test_wire_dtype_is_as_asked_and_ranks_that_do_not_keep_get_nothing() -> None:
    policy = Policy(tied=True)
    assert {tensor.dtype for _, tensor in gather(policy, dtype=torch.bfloat16, device="cpu", keep=True)} == {
        torch.bfloat16
    }
    assert gather(policy, dtype=torch.bfloat16, device="cpu", keep=False) == []


def test_traces_of_wrappers_are_removed_from_names() -> None:
    assert checkpoint_name("_orig_mod.model.layers.0._checkpoint_wrapped_module.mlp.w") == "model.layers.0.mlp.w"


def shard_and_gather(rank: int, port: int, directory: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    policy = Policy(tied=True)
    for layer in policy.layers:
        fully_shard(layer)
    fully_shard(policy)
    weights = gather(policy, dtype=torch.float32, device="cpu", keep=rank == 0)
    torch.save(dict(weights), Path(directory) / f"rank-{rank}.pt")
    dist.destroy_process_group()


def test_sharded_weights_are_gathered_whole_on_rank_0_only(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(shard_and_gather, args=(port, str(tmp_path)), nprocs=2)
    whole, expected = torch.load(tmp_path / "rank-0.pt"), Policy(tied=True).state_dict()
    assert set(whole) == set(expected)
    assert all(torch.equal(whole[name], expected[name]) for name in expected)
    assert torch.load(tmp_path / "rank-1.pt") == {}
