"""The trainer's torchrun group as a child process, and its own words when it fails."""

import json
import os
import sys
from pathlib import Path

from flows.run import Run
from flows.supervise import Child, ChildFailed, Command

# With the engines' own grace after it, the whole run is gone within fifteen seconds; a trainer in the middle of a
# longer step loses that step, which the next attempt repeats.
GRACE_SECONDS = 8.0
# What the trainer says of a run that cannot go on, whoever tries.
FINAL = ("NothingAdmissible", "SequenceTooLong")


def start_trainer(run: Run, attempt: int, policy: Path, logs: Path) -> Child:
    """Start the group of one attempt."""
    failure_file(logs).unlink(missing_ok=True)
    return Child(trainer_command(run, attempt, policy, logs))


def trainer_command(run: Run, attempt: int, policy: Path, logs: Path) -> Command:
    """What to start. Pure."""
    config = run.config
    training = config.training
    python = str(training.python or sys.executable)
    group = [f"--nproc-per-node={training.ranks}", "--max-restarts=0"]
    if training.nodes > 1:
        group += [f"--nnodes={training.nodes}", "--node-rank=0"]
        group += ["--rdzv-backend=c10d", f"--rdzv-endpoint={training.rendezvous}"]
    else:
        group += ["--standalone"]
    arguments = [
        *(python, "-m", "torch.distributed.run", *group, "-m", "grpo_core.training"),
        *("--root", config.storage.root, "--run-id", config.run_id, "--attempt", str(attempt), "--policy", str(policy)),
        *("--storage-options", json.dumps(config.storage.options), "--storage-client", config.storage.client),
        *("--failure-file", str(failure_file(logs))),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(training.threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return Command("trainer", arguments, environment, logs / "trainer.log", grace_seconds=GRACE_SECONDS)


def trainer_failure(trainer: Child, logs: Path) -> ChildFailed:
    """What ended the trainer: a rank's own words if it left any, because torchrun's last lines are about torchrun."""
    words = failure_file(logs)
    if words.exists():
        return ChildFailed(f"the trainer failed: {words.read_text(encoding='utf-8')}; see {trainer.command.log}")
    return trainer.failure()


def gave_up(logs: Path) -> bool:
    """Whether the trainer ended for a reason that another attempt would only meet again."""
    words = failure_file(logs)
    return words.exists() and words.read_text(encoding="utf-8").split(":")[0] in FINAL


def failure_file(logs: Path) -> Path:
    """Where the first rank that fails says why."""
    return logs / "trainer.failure"
