"""Continuing a run that has a long history: what comes before the first new step, beyond starting processes.

    python -m benchmarks.resume --steps 31250 --root /tmp/forebay-resume

A run of `--steps` steps of 32 prompts, a million ordinals by default, is laid out in a local store: its records, its
last steps and its checkpoints as the real run writes them, everything older under its right name as a hard link to one
file, because a resume that is right never opens it. Each history is then continued in a fresh process, which does what
flow and trainer do from opening the store to their first look at what is new.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from flows.inquest import LEASES, hold_inquest
from flows.leasing import Leasing
from flows.run import check_owner, claim_attempt, finished_run, newest_checkpoint, open_run
from flows.views.status import status
from grpo_core.config import RunConfig
from grpo_core.prompts import PromptStream, Row, Splits
from grpo_core.schedule.frontier import Frontier, FrontierState
from grpo_core.training.feed import Feed, Lineage, PartCache
from grpo_core.training.planning import teaches
from storage import layout, schema
from storage.attempts import claim_next, living_chain
from storage.checkpoints import Manifest, commit_manifest
from storage.layout import PartName
from storage.leases import LeaseRecord, write_lease
from storage.ledger import LedgerWriter, Totals, ledger_rows, newest_footer
from storage.objects import ObjectStore
from storage.pool import RefitRecord, write_refit
from storage.trajectories import TrajectoryStore

PROMPTS, ROLLOUTS = 32, 8
SHORT, LONG = 500, 31_250
BUFFERED = 2
# What is written as a run writes it; a resume and `status` open no step that is older.
STEPS_WRITTEN = 16
SAVED = 10
SPLITS = Splits(
    [Row([{"role": "user", "content": f"{index} + 1 ="}], {"answer": index + 1}) for index in range(3000)], []
)
# ext4 gives a file at most 65,000 names.
MOST_LINKS = 60_000


class History:
    """A run of `steps` steps, stopped after its last: one lease and one part a step, drops while it waits for each.
    The newest `leases` of them are written in full."""

    def __init__(self, root: Path, steps: int, *, leases: int = LEASES + BUFFERED) -> None:
        self.root = root
        self.steps = steps
        self.leases = leases
        self.store = ObjectStore.open(str(root))
        self.config = config(steps)
        self._links: dict[str, tuple[str, int]] = {}
        self._directories: set[Path] = set()

    def write(self) -> None:
        open_run(self.config, self.store, SPLITS, tokenizer_digest="0", canary=[1, 2])
        claim_next(self.store, parent=None, host="elsewhere", pid=1, pid_started_at=0.0, claimed_at=0.0)
        trajectories, ledger, totals = TrajectoryStore(self.store, 1), LedgerWriter(self.store, 1), Totals()
        for lease in range(self.steps + BUFFERED):
            ordinals = range(lease * PROMPTS, (lease + 1) * PROMPTS)
            if 0 < lease < self.steps + BUFFERED - self.leases:
                self._link(layout.lease(1, 0), layout.lease(1, lease))
                self._link(layout.part(1, 0, 0), layout.part(1, lease, 0))
            else:
                write_lease(self.store, LeaseRecord(1, lease, tuple(ordinals), 0.0, f"1.{max(0, lease - BUFFERED)}"))
                trajectories.append(lease, schema.table(rows(ordinals, lease), schema.SHARD), last=True)
        for step in range(1, self.steps + 1):
            if 1 < step < self.steps - STEPS_WRITTEN:
                self._link(layout.ledger_step(1, 1), layout.ledger_step(1, step))
                self._link(layout.drops(1, 1, 0), layout.drops(1, step, 0))
                self._link(layout.refit(1, 1), layout.refit(1, step))
            else:
                trained = PROMPTS * step
                totals = Totals(trained=trained, tokens_generated=trained * ROLLOUTS, tokens_trained=trained * ROLLOUTS)
                ledger.write_drops(step, ledger_rows([]), totals)
                ledger.write_step(step, ledger_rows(decided(step)), totals, {"step_seconds": 1.0})
                write_refit(self.store, RefitRecord(1, step, step, ("engine-0",), {}, {}))
            if step in (self.steps - SAVED, self.steps):
                commit_manifest(self.store, self._manifest(step))

    def _manifest(self, step: int) -> Manifest:
        frontier = Frontier()
        frontier.leased(range((step + BUFFERED) * PROMPTS))
        frontier.buffered(range((step + BUFFERED) * PROMPTS))
        frontier.trained(range(step * PROMPTS), step)
        pinned = tuple(PartName(1, lease, 0) for lease in range(step, step + BUFFERED))
        return Manifest(1, step, step, {}, frontier.checkpoint().to_json(), 0.0, pinned, {}, {"random_states": []})

    def _link(self, original: str, key: str) -> None:
        """Another name for an object, or a copy of it where the file has names enough."""
        source, count = self._links.get(original, (original, 0))
        target = self.root / key
        if target.parent not in self._directories:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._directories.add(target.parent)
        if count < MOST_LINKS:
            os.link(self.root / source, target)
            self._links[original] = (source, count + 1)
        else:
            target.write_bytes((self.root / source).read_bytes())
            self._links[original] = (key, 0)


def config(steps: int) -> RunConfig:
    grpo = {"num_prompts_per_step": PROMPTS, "num_generations_per_prompt": ROLLOUTS, "max_num_steps": steps + 1000}
    return RunConfig.model_validate({"run_id": "resume", "grpo": grpo, "generation": {"lease_prompts": PROMPTS}})


def rows(ordinals: range, version: int) -> Iterator[dict[str, Any]]:
    """The rows of whole groups, a few tokens each."""
    for ordinal in ordinals:
        for rollout in range(ROLLOUTS):
            yield {
                **{name: 0 for name in ("attempt", "lease", "part", "sequence", "epoch", "tool_calls", "tool_failures")},
                **{name: "" for name in ("run_id", "group_id", "environment", "messages")},
                "ordinal": ordinal, "rollout": rollout, "dataset_index": ordinal % 3000, "prompt_length": 2,
                "token_ids": [1, 2, 3, 4], "loss_mask": [False, False, True, True], "logprobs": [0.0, 0.0, -0.5, -0.5],
                "version_spans": [{"attempt": 1, "version": version, "start": 2, "end": 4}],
                "engine": "engine-0", "reward": float(rollout % 2), "finish_reason": "stop", "status": "ok", "turns": 1,
            }  # fmt: skip


def decided(step: int) -> Iterator[dict[str, Any]]:
    """The ledger rows of a step."""
    for ordinal in range((step - 1) * PROMPTS, step * PROMPTS):
        yield {"ordinal": ordinal, "state": "trained", "lease_attempt": 1, "lease": step - 1, "part": 0, "lag_max": 1}


class Stopwatch:
    """Seconds of named phases, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began


def resume(root: Path, watch: Stopwatch) -> tuple[Leasing, Feed]:
    """What flow and trainer do before the first new step."""
    with watch.phase("open the run"):
        store = ObjectStore.open(str(root))
        settings = RunConfig.model_validate(json.loads((root / layout.run()).read_text())["config"])
        assert finished_run(settings, store) is None
        after = check_owner(store, take_over=False)
        run = open_run(settings, store, SPLITS, tokenizer_digest="0", canary=[1, 2])
    with watch.phase("newest valid checkpoint"):
        manifest = newest_checkpoint(run, print)
        assert manifest is not None
    with watch.phase("claim"):
        claim = claim_attempt(run, manifest, after=after)
    with watch.phase("leasing"):
        stream = PromptStream(SPLITS.train, seed=settings.data.seed)
        leasing = Leasing(store, claim.attempt, run.window, stream, manifest, keep_buffered=True)
        leasing.heed(
            hold_inquest(store, after, lives=settings.generation.max_rollout_attempts, leasable=leasing.leasable)
        )
    with watch.phase("feed"):
        frontier = Frontier.resume(FrontierState.from_json(manifest.frontier))
        trajectories = TrajectoryStore(store, claim.attempt)
        lineage = Lineage.of(living_chain(store), every_steps=settings.refit.every_steps)
        cache = PartCache(trajectories)
        feed = Feed(
            store,
            trajectories,
            claim.attempt,
            frontier,
            cache,
            rollouts=ROLLOUTS,
            least=ROLLOUTS,
            lineage=lineage,
            teaches=partial(teaches, config=settings),
        )
        feed.restore(manifest.pinned, manifest.frontier["buffered"])
        assert newest_footer(store) is not None
    with watch.phase("first look"):
        leasing.observe()
        feed.poll()
    return leasing, feed


def measure(steps: int, root: Path) -> dict[str, Any]:
    """Lay a history out, unless it is there, and continue it in a fresh process."""
    if not (root / layout.run()).exists():
        History(root, steps).write()
    arguments = [sys.executable, "-m", "benchmarks.resume", "--resume", str(root)]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=600)
    return {"ordinals": steps * PROMPTS, **json.loads(done.stdout.splitlines()[-1])}


def measured(root: Path) -> dict[str, Any]:
    """Seconds per phase, of all of them and of `status`, and by how much the peak of memory grew, in MiB."""
    pa.array([0])  # the first array of a process loads pandas, where it is installed: a part of starting up
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is in use
    before = memory("VmRSS")
    watch = Stopwatch()
    _, feed = resume(root, watch)
    assert len(feed.groups) == BUFFERED * PROMPTS
    phases = dict(watch.seconds)
    grown = memory("VmHWM") - before
    with watch.phase("status"):
        status(ObjectStore.open(str(root), read_only=True))
    return {"seconds": sum(phases.values()), "mib": grown, "status": watch.seconds["status"], "phases": phases}


def memory(name: str) -> float:
    """A line of this process's memory account, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def table(short: int = SHORT, long: int = LONG) -> list[dict[str, float | str]]:
    """The long history beside the short one, for the table of all benchmarks."""
    with tempfile.TemporaryDirectory(prefix="forebay-resume-") as name:
        few, many = (measure(steps, Path(name) / str(steps)) for steps in (short, long))
    title = f"{many['ordinals']:,} ordinals of history (plain: {few['ordinals']:,})"
    cases = {"resume": ("seconds", "s"), "memory of a resume": ("mib", "MiB"), "status": ("status", "s")}
    return [
        {"case": f"{case}, {title}", "ours": many[key], "theirs": few[key], "unit": unit}
        for case, (key, unit) in cases.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=LONG)
    parser.add_argument(
        "--root", type=Path, help="where the history is laid out, and kept; default: a temporary directory"
    )
    parser.add_argument("--resume", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.resume is not None:
        print(json.dumps(measured(arguments.resume)))
        return
    with tempfile.TemporaryDirectory(prefix="forebay-resume-") as name:
        found = measure(arguments.steps, arguments.root or Path(name))
    print(
        f"{found['ordinals']:,} ordinals: {found['seconds']:.2f} s, {found['mib']:.1f} MiB; status {found['status']:.2f} s"
    )
    for phase, seconds in found["phases"].items():
        print(f"  {phase:30} {seconds:.3f} s")


if __name__ == "__main__":
    main()
