"""A checkpoint as a Hugging Face directory, made by a child process, so that the command itself never loads torch."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from flows.assembly import log_directory
from flows.control import LocalControl, Signals
from flows.policy import PolicyPreparation
from flows.run import RunRefused
from flows.supervise import Child, ChildFailed, Command
from flows.views.standing import recorded_run
from grpo_core.config import RunConfig
from storage.checkpoints import committed
from storage.objects import ObjectStore

EXPORT_SECONDS = 3600.0


def export_checkpoint(
    store: ObjectStore, run_id: str, output: Path, step: int | None, storage_options: dict[str, Any]
) -> None:
    """Write the checkpoint of `step`, by default the newest, to `output`. Raise RunRefused or ChildFailed."""
    recorded = recorded_run(store)
    names = [name for name in committed(store) if step is None or name.step == step]
    if not names:
        steps = ", ".join(str(name.step) for name in committed(store)) or "none"
        raise RunRefused(
            f"run {run_id} has no checkpoint{'' if step is None else f' of step {step}'}; there are: {steps}"
        )
    options = storage_options or recorded.config.storage.options
    arguments = ["--root", store.url, "--storage-options", json.dumps(options)]
    arguments += ["--storage-client", recorded.config.storage.client]
    arguments += ["--attempt", str(names[-1].attempt), "--step", str(names[-1].step)]
    arguments += ["--policy", str(policy_of(store, recorded.config)), "-o", str(output)]
    log = log_directory(recorded.config, store) / "export.log"
    python = str(recorded.config.training.python or sys.executable)
    command = Command(
        "export", [python, "-W", "ignore", "-m", "grpo_core.training.export", *arguments], os.environ, log
    )
    with Child(command) as child:
        try:
            status = child.wait(EXPORT_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise ChildFailed(
                f"the export did not end within {EXPORT_SECONDS:g} s; its last lines, of {log}, are:\n{child.tail()}"
            ) from error
        if status != 0:
            raise child.failure()


def policy_of(store: ObjectStore, config: RunConfig) -> Path:
    """The directory of version 0, found in the cache or made again."""
    with Signals() as signals:
        control = LocalControl(signals, show=lambda progress: None, say=lambda message: print(message, file=sys.stderr))
        with PolicyPreparation(config, log_directory(config, store), control) as policy:
            return policy.skeleton()
