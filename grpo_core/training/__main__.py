"""The trainer process: `torchrun … -m grpo_core.training --root URL --run-id ID --attempt N --policy DIRECTORY`.

Every rank runs this. It shares nothing with the flow but the store; it ends by itself when its parent is gone.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from grpo_core.config import RunConfig, StreamData
from grpo_core.recipe import with_changes
from grpo_core.refit.backends import transfer_of
from grpo_core.schedule.frontier import Frontier, FrontierState
from grpo_core.schedule.window import Window
from grpo_core.training import PARENT, checkpoint
from grpo_core.training.conductor import Conductor
from grpo_core.training.feed import Feed, Lineage, PartCache
from grpo_core.training.flops import Machine, machine_of
from grpo_core.training.loop import Rank, follow
from grpo_core.training.lora import adapter_weights
from grpo_core.training.model import Policy, load_policy
from grpo_core.training.optimizer import make_optimizer
from grpo_core.training.planning import teaches
from grpo_core.training.reference import Reference, load_reference
from storage import layout
from storage.attempts import Fence, living_chain, read_attempt
from storage.checkpoints import Manifest, read_manifest
from storage.ledger import LedgerWriter, Totals, newest_footer
from storage.objects import ObjectStore
from storage.prompt_log import logged_prompts
from storage.records import read_record
from storage.trajectories import TrajectoryStore


def main() -> None:
    """Run this rank to its end; the first rank that fails leaves its reason where the flow looks for it."""
    arguments = _arguments()
    try:
        run(arguments)
    except Exception as error:
        try:
            with arguments.failure_file.open("x", encoding="utf-8") as file:
                file.write(f"{type(error).__name__}: {error}")
        except FileExistsError:
            print("another rank failed first", file=sys.stderr)
        raise


def run(arguments: argparse.Namespace) -> None:
    """Run this rank to the end of the run, or until it is told to stop."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    threading.Thread(target=_end_with_parent, args=(PARENT,), daemon=True).start()

    store = ObjectStore.open(
        layout.run_root(arguments.root, arguments.run_id),
        json.loads(arguments.storage_options),
        client=arguments.storage_client,
    )
    claim = read_attempt(store, arguments.attempt)
    described = read_record(store, layout.run())
    config = with_changes(RunConfig.model_validate(described["config"]), claim.config_changes)
    device = _join_group(config)
    manifest = read_manifest(store, *claim.parent) if claim.parent is not None else None
    policy, optimizer, reference = _learner(config, store, manifest, arguments.policy, device)
    first = dist.get_rank() == 0
    fence = Fence(store, claim.attempt)
    trajectories = TrajectoryStore(store, claim.attempt, fence=fence.check)
    rank = Rank(
        config=config,
        store=store,
        attempt=claim.attempt,
        policy=policy,
        optimizer=optimizer,
        cache=PartCache(trajectories),
        canary=tuple(described["canary"]),
        device=device,
        transfer=transfer_of(config, store, fence=fence.check) if first else None,
        reference=reference,
    )
    commands = None
    if first:
        conductor = _conductor(
            config=config,
            store=store,
            attempt=claim.attempt,
            manifest=manifest,
            trajectories=trajectories,
            cache=rank.cache,
            fence=fence,
            stopping=stop.is_set,
            prompts=partial(_prompts, config, store, described["prompts"]),
            machine=machine_of(
                policy.language_model.config, device, dist.get_world_size(), adapters=adapter_weights(policy)
            ),
        )
        commands = conductor.commands()
    follow(rank, commands)
    dist.destroy_process_group()
    # Everything is durable. Gloo's and Arrow's own threads may still want the interpreter, and one that meets it while
    # it is being taken down aborts the process: a finished run would count as a crash.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _learner(
    config: RunConfig, store: ObjectStore, manifest: Manifest | None, directory: Path, device: torch.device
) -> tuple[Policy, torch.optim.Optimizer, Reference | None]:
    """This rank's share of policy and optimizer, as in the checkpoint of `manifest`, or version 0 of `directory`, and
    of the reference, which is always version 0."""
    torch.manual_seed(config.seed + dist.get_rank())
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = load_policy(directory, config, mesh=mesh)
    optimizer = make_optimizer(policy, config.optimizer)
    if manifest is not None:
        checkpoint.resume(store, manifest, policy, optimizer, seed=config.seed)
    return policy, optimizer, load_reference(directory, config, policy, mesh=mesh)


def _conductor(
    *,
    config: RunConfig,
    store: ObjectStore,
    attempt: int,
    manifest: Manifest | None,
    trajectories: TrajectoryStore,
    cache: PartCache,
    fence: Fence,
    stopping: Callable[[], bool],
    prompts: Callable[[], int | None],
    machine: Machine | None,
) -> Conductor:
    keep = config.checkpointing.load_replay_buffer
    frontier = Frontier()
    if manifest is not None:
        frontier = Frontier.resume(FrontierState.from_json(manifest.frontier), keep_buffered=keep)
    lineage = Lineage.of(living_chain(store), every_steps=config.refit.every_steps)
    rollouts = config.grpo.num_generations_per_prompt
    least = config.generation.min_group_members or rollouts
    feed = Feed(
        store,
        trajectories,
        attempt,
        frontier,
        cache,
        rollouts=rollouts,
        least=least,
        lineage=lineage,
        teaches=partial(teaches, config=config),
    )
    if manifest is not None and keep:
        feed.restore(manifest.pinned, manifest.frontier["buffered"])
    footer = newest_footer(store)
    return Conductor(
        config=config,
        store=store,
        attempt=attempt,
        window=Window.of(config.grpo, config.refit, prompts=prompts()),
        done=0 if manifest is None else manifest.step,
        feed=feed,
        ledger=LedgerWriter(store, attempt, fence=fence.check),
        totals=Totals() if footer is None else footer.totals,
        fence=fence.check,
        stopping=stopping,
        report=_Report(store, attempt),
        prompts=prompts,
        ranks=dist.get_world_size(),
        machine=machine,
    )


def _prompts(config: RunConfig, store: ObjectStore, recorded: int | None) -> int | None:
    """Prompts of one epoch; those of a stream when it has ended."""
    return logged_prompts(store) if isinstance(config.data.source, StreamData) else recorded


class _Report:
    """The trainer's progress record: a hint for the flow and for people, overwritten as it goes."""

    def __init__(self, store: ObjectStore, attempt: int) -> None:
        self._store = store
        self._key = layout.progress(attempt, "trainer")
        self._content: dict[str, Any] = {}

    def __call__(self, content: dict[str, Any]) -> None:
        self._content |= content | {"at": time.time()}
        self._store.put(self._key, json.dumps(self._content).encode())


def _join_group(config: RunConfig) -> torch.device:
    timeout = timedelta(seconds=config.training.step_timeout_seconds + 120)
    if config.training.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        # Objects and scalars travel over gloo beside NCCL, so that commands never wait behind gradients.
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout)
        return device
    torch.set_num_threads(config.training.threads)
    dist.init_process_group("gloo", timeout=timeout)
    return torch.device("cpu")


def _end_with_parent(parent: int) -> None:
    """torchrun may be killed outright, and then nobody would tell its ranks. It may even have been gone before this
    process could note who started it, and then its parent is somebody else."""
    if not _launches_ranks(parent):
        os._exit(1)
    while os.getppid() == parent:
        time.sleep(0.5)
    print("the parent process is gone; ending", file=sys.stderr, flush=True)
    os._exit(1)


def _launches_ranks(pid: int) -> bool:
    try:
        return any("torchrun" in word or "torch.distributed.run" in word for word in psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:
        return False


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m grpo_core.training", description=__doc__)
    parser.add_argument("--root", required=True)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--attempt", required=True, type=int)
    parser.add_argument("--policy", required=True, type=Path, help="directory of the weights of version 0")
    parser.add_argument("--failure-file", required=True, type=Path, help="where to say why, if this rank fails first")
    parser.add_argument("--storage-options", default="{}", help="JSON")
    parser.add_argument("--storage-client", default="fsspec")
    return parser.parse_args()


if __name__ == "__main__":
    main()
