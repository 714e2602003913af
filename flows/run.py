"""A run in its store: opened, recorded once, continued under its rules, and owned by one flow at a time.

Invariants: run.json is written once; what may not change when a run is continued is compared with it by name; the
newest attempt belongs to whoever claimed it, and a second flow is refused while that owner shows signs of life.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from grpo_core import recipe
from grpo_core.config import RunConfig, StreamData
from grpo_core.evaluation import goal_reached, living_evaluations
from grpo_core.prompts import Splits
from grpo_core.schedule.agenda import Agenda
from grpo_core.schedule.window import Window
from storage import layout
from storage.attempts import AttemptClaim, claim_next, living_chain, newest
from storage.checkpoints import CheckpointName, DamagedCheckpoint, Manifest, committed, newest_valid
from storage.errors import ObjectMissing
from storage.ledger import newest_footer
from storage.objects import ObjectStore
from storage.prompt_log import logged_prompts
from storage.records import read_record, write_record

FORMAT = 1
# A flow writes its progress every second or so; an owner on another host that is silent this long is dead.
SILENCE_SECONDS = 60.0


class RunRefused(RuntimeError):
    """A run that cannot be started or continued as asked; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Run:
    """An open run. `changes` are the dotted keys in which this call differs from run.json."""

    config: RunConfig
    store: ObjectStore
    splits: Splits
    changes: dict[str, Any]
    window: Window


def open_store(config: RunConfig) -> ObjectStore:
    """The store of a run. Raise StoreRefused when it cannot be used."""
    return ObjectStore.open(
        layout.run_root(config.storage.root, config.run_id), config.storage.options, client=config.storage.client
    )


def open_run(
    config: RunConfig, store: ObjectStore, splits: Splits, *, tokenizer_digest: str, canary: Sequence[int]
) -> Run:
    """Record a new run, or check that this call may continue the recorded one. Raise RunRefused."""
    window = Window.of(config.grpo, config.refit, prompts=splits.prompts)
    if window.last_step() < 1:
        raise RunRefused(
            f"{config.grpo.max_num_epochs} epochs of {len(splits.train)} prompts do not fill one step of "
            f"grpo.num_prompts_per_step={config.grpo.num_prompts_per_step}; lower it or raise grpo.max_num_epochs"
        )
    digests = {"dataset": splits.digest(), "tokenizer": tokenizer_digest}
    if not store.exists(layout.run()):
        fields = {
            "format": FORMAT,
            "config": config.model_dump(mode="json"),
            "digests": digests,
            "prompts": splits.prompts,
            "canary": list(canary),
        }
        write_record(store, layout.run(), fields)
        return Run(config, store, splits, {}, window)
    window = recorded_window(config, store, splits.prompts)
    recorded = read_record(store, layout.run())
    if recorded["format"] != FORMAT:
        raise RunRefused(
            f"run {config.run_id} in {store.url} has format {recorded['format']}, this version writes {FORMAT}; continue it with the version that made it"
        )
    before = recipe.parse(recorded["config"], where=f"run.json of {store.url}")
    keys = recipe.changed_keys(before, config)
    refused = [key for key in keys if not recipe.continuable(key)]
    if refused:
        raise RunRefused(
            f"run {config.run_id} in {store.url} was made with another {', '.join(refused)}; change it back, or choose another --run-id"
        )
    for name, digest in digests.items():
        if recorded["digests"][name] != digest:
            raise RunRefused(
                f"run {config.run_id} in {store.url} was made with another {name}; bring the old one back, or choose another --run-id"
            )
    new = recipe.leaves(config)
    return Run(config, store, splits, {key: new.get(key) for key in keys}, window)


def newest_checkpoint(run: Run, warn: Callable[[str], None]) -> Manifest | None:
    """The checkpoint to resume from, every byte of it verified; None for a run that has none."""

    def damaged(name: CheckpointName, error: DamagedCheckpoint) -> None:
        warn(f"checkpoint {name.attempt}/{name.step} is skipped: {error}")

    return newest_valid(run.store, on_damaged=damaged)


def finished_run(config: RunConfig, store: ObjectStore) -> int | None:
    """The number of steps of a recorded run that has nothing left to do; None if there is work, or no run yet."""
    if not store.exists(layout.run()):
        return None
    recorded = read_record(store, layout.run())
    if recorded["format"] != FORMAT or any(
        not recipe.continuable(key)
        for key in recipe.changed_keys(recipe.parse(recorded["config"], where=f"run.json of {store.url}"), config)
    ):
        return None
    return finished_at(config, store, recorded_window(config, store, recorded["prompts"]))


def recorded_window(config: RunConfig, store: ObjectStore, prompts: int | None) -> Window:
    """The window of a recorded run. `prompts`: as in run.json; what a stream came to is in its record."""
    if isinstance(config.data.source, StreamData):
        prompts = logged_prompts(store)
    return Window.of(config.grpo, config.refit, prompts=prompts)


def finished_at(config: RunConfig, store: ObjectStore, window: Window) -> int | None:
    """The last step of a run that reached its end or its goal, if its checkpoint and the evaluations that it owes are
    there; None if it goes on."""
    names, newest_decision = committed(store), newest_footer(store)
    if not names or newest_decision is None:
        return None
    step, every = newest_decision.step_done, window.every_steps
    if names[-1].step < step:
        return None
    evaluated = {name.version for name in living_evaluations(store, living_chain(store), every_steps=every)}
    if config.has_held_out and Agenda.of(config.evaluation, config.refit).owed_at_end(step // every, evaluated):
        return None
    ended = step >= window.last_step(done=step, settled=newest_decision.totals.settled)
    return step if ended or goal_reached(store, config) is not None else None


def check_owner(store: ObjectStore, *, take_over: bool) -> int:
    """The number of the newest attempt, 0 before the first. Raise RunRefused while the flow that claimed it lives."""
    claim = newest(store)
    if claim is None or take_over:
        return 0 if claim is None else claim.attempt
    if claim.host == socket.gethostname():
        if claim.pid != os.getpid() and _lives(claim.pid, claim.pid_started_at):
            raise RunRefused(
                f"run in {store.url} belongs to process {claim.pid} on this host, which is alive; wait for it, stop it, or fence it with --take-over"
            )
        return claim.attempt
    silent = time.time() - last_sign(store, claim)
    if silent < SILENCE_SECONDS:
        raise RunRefused(
            f"run in {store.url} belongs to process {claim.pid} on {claim.host}, last heard of {silent:.0f} s ago; wait until it has been silent for "
            f"{SILENCE_SECONDS:.0f} s, or fence it with --take-over"
        )
    return claim.attempt


def last_sign(store: ObjectStore, claim: AttemptClaim) -> float:
    """When the owner of an attempt last showed that it lives, in Unix seconds."""
    try:
        return float(json.loads(store.get(layout.progress(claim.attempt, "flow")))["at"])
    except ObjectMissing:
        return claim.claimed_at


def claim_attempt(run: Run, parent: Manifest | None, *, after: int) -> AttemptClaim:
    """Claim attempt `after` + 1 for this process, resuming from `parent`. Raise Fenced when it is somebody else's."""
    return claim_next(
        run.store,
        parent=None if parent is None else (parent.attempt, parent.step),
        host=socket.gethostname(),
        pid=os.getpid(),
        pid_started_at=psutil.Process().create_time(),
        claimed_at=time.time(),
        config_changes=run.changes,
        after=after,
    )


def _lives(pid: int, started_at: float) -> bool:
    try:
        return abs(psutil.Process(pid).create_time() - started_at) < 1.0
    except psutil.NoSuchProcess:
        return False
