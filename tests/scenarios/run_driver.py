"""Drives one run of the real command from outside, as a person with a terminal and a `kill` would.

    driver = RunDriver(directory, cache)
    driver.start()
    driver.wait_for(steps_done(3))
    driver.kill("trainer rank")
    assert driver.finish() == 0

The flow, the trainer and the store are the real ones. The engine is `tests/model_engine.py`, started by the flow
through `pool.python`, a script that takes the place of the interpreter. Every process that descends from a run carries
the run's directory in its environment, so none of them can hide.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml

from grpo_core import recipe
from grpo_core.config import RunConfig
from grpo_core.prompts import load_splits
from grpo_core.training import origin, prepare
from storage import layout
from storage.checkpoints import Manifest, committed, verify
from storage.ledger import LedgerFooter, newest_footer
from storage.objects import ObjectStore
from tests import model_engine
from tests.scenarios import store_faults, transfer_faults
from tests.scenarios.store_faults import Fault

REPOSITORY = Path(__file__).parents[2]
FOREBAY = str(Path(sys.executable).parent / "forebay")
MARK = "FOREBAY_SCENARIO"
RUN_ID = "scenario"
WAIT_SECONDS = 240.0
POLL_SECONDS = 0.05

Part = Literal["flow", "torchrun", "trainer rank", "engine"]
Predicate = Callable[[ObjectStore], bool]

RECIPE: dict[str, Any] = {
    "run_id": RUN_ID,
    "model": {
        "source": {
            "kind": "tiny",
            "hidden_size": 64,
            "layers": 2,
            "heads": 2,
            "kv_heads": 1,
            "intermediate_size": 96,
            "vocabulary_size": 280,
        },
        "dtype": "float32",
        "context_length": 64,
    },
    "data": {"source": {"kind": "files"}},
    "rewards": {"functions": [{"function": "scenario_rewards:even_share"}], "timeout_seconds": 20},
    "generation": {
        "max_completion_length": 12,
        "flush_seconds": 0.1,
        "request_timeout_seconds": 30,
        "lease_timeout_seconds": 50,
    },
    "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 2, "max_num_steps": 6},
    "optimizer": {"learning_rate": 1e-3},
    "packing": {"token_budget": 128},
    "training": {"step_timeout_seconds": 60},
    "refit": {"control_timeout_seconds": 20, "transfer_timeout_seconds": 30},
    "checkpointing": {"save_period": 2},
    "evaluation": {"at_start": False, "at_end": False},
    "pool": {"kind": "local", "start_timeout_seconds": 60},
    "logging": {"progress_seconds": 0.5},
}

# Synchronous GRPO: with the deterministic engine, such a run comes to the same bits however it is disturbed.
# Shared prefixes add up in another order than sequences do one by one; the plain loop does not have them.
SYNCHRONOUS: dict[str, Any] = {
    "grpo": {"max_num_steps": 4, "async_grpo": {"max_trajectory_age_steps": 0}},
    "packing": {"share_prefixes": False},
}


@dataclass
class RunDriver:
    """One run below `directory`. `settings` are merged over RECIPE; `cache` keeps the policy between runs."""

    directory: Path
    cache: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    process: subprocess.Popen[str] | None = None

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.faults = self.directory / "faults.json"
        self._store_faults = self.directory / "store-faults.json"
        self._held_refit = self.directory / "held-refit"
        self._errors = self.directory / "stderr.txt"
        self._output = self.directory / "stdout.txt"
        prompts, held_out = self.directory / "prompts.jsonl", self.directory / "held_out.jsonl"
        prompts.write_text("".join(f'{{"prompt": "{a} + {b} ="}}\n' for a in range(5) for b in range(3)))
        held_out.write_text("".join(f'{{"prompt": "{a} + {b} ="}}\n' for a in range(5, 7) for b in range(2)))
        own = {
            "storage": {"root": str(self.directory / "store")},
            "model": {"cache_directory": str(self.cache)},
            "data": {"source": {"path": str(prompts), "held_out_path": str(held_out)}},
            "pool": {"python": str(interpreter_that_starts_the_model_engine(self.directory))},
        }
        self.recipe = merged(merged(RECIPE, own), self.settings)

    @cached_property
    def store(self) -> ObjectStore:
        """The run's store; opening it creates it."""
        storage = self.recipe["storage"]
        return ObjectStore.open(layout.run_root(storage["root"], self.recipe["run_id"]), storage.get("options"))

    @property
    def config(self) -> RunConfig:
        """The recipe with every default."""
        return recipe.parse(self.recipe, where="the scenario")

    def policy(self) -> Path:
        """The directory of version 0, which a run would make too."""
        source = prepare.source_of(self.config, load_splits(self.config.data).train)
        return origin.prepare(source, self.cache / origin.digest(source))

    def start(self, *options: str) -> subprocess.Popen[str]:
        """Start `forebay train` and return at once."""
        path = self.directory / "recipe.yaml"
        path.write_text(yaml.safe_dump(self.recipe), encoding="utf-8")
        environment = {
            **os.environ,
            MARK: str(self.directory),
            model_engine.FAULTS: str(self.faults),
            store_faults.FAULTS: str(self._store_faults),
            transfer_faults.HOLD: str(self._held_refit),
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "tests" / "scenarios"), str(REPOSITORY)]),
            "OMP_NUM_THREADS": "1",
        }
        command = [FOREBAY, "train", str(path), "--no-prefect", *options]
        with self._output.open("w") as output, self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                command, cwd=self.directory, env=environment, stdout=output, stderr=errors, text=True
            )
        return self.process

    def finish(self, seconds: float = WAIT_SECONDS) -> int:
        """Wait for the command to end; its exit status."""
        assert self.process is not None
        return self.process.wait(seconds)

    def run(self, *options: str) -> int:
        self.start(*options)
        return self.finish()

    @property
    def errors(self) -> str:
        """What the newest command wrote to standard error."""
        return self._errors.read_text()

    @property
    def output(self) -> str:
        return self._output.read_text()

    def wait_for(self, predicate: Predicate, seconds: float = WAIT_SECONDS) -> None:
        """Wait until the store is as wanted, while the command runs."""
        assert self.process is not None
        deadline = time.monotonic() + seconds
        while not predicate(self.store):
            assert self.process.poll() is None, f"the command ended with {self.process.poll()}: {self.errors}"
            assert time.monotonic() < deadline, f"not within {seconds:g} s; {self.errors}\n{self.log('trainer')}"
            time.sleep(POLL_SECONDS)

    def arm(self, *faults: Fault) -> None:
        """Make these the faults that are to happen at the store's writes, in place of any that did not happen yet."""
        store_faults.arm(self._store_faults, faults)

    def armed(self) -> list[Fault]:
        """The faults at the store's writes that have not happened yet."""
        return store_faults.armed(self._store_faults)

    def wait_for_faults(self) -> None:
        """Wait until every armed fault has happened."""
        self.wait_for(lambda store: not self.armed())

    def wait_for_stall(self) -> None:
        """Wait until the engine stands still in the weight update that the fault names."""
        self.wait_for(lambda store: "stall_in_update" not in self.faults.read_text())

    def hold_refit(self, number: int) -> None:
        """Let the next command's trainer stand still in a refit, when a tensor has been sent this many times."""
        self._held_refit.write_text(str(number))

    def wait_for_held_refit(self, seconds: float = WAIT_SECONDS) -> None:
        self.wait_for(lambda store: self._held_refit.read_text() == transfer_faults.HELD, seconds)

    def release_refit(self) -> None:
        self._held_refit.unlink()

    def processes(self) -> list[psutil.Process]:
        """Every living process that descends from this run's commands."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(self.directory) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def find(self, part: Part) -> list[psutil.Process]:
        """The living processes that are this part of the run."""
        return [process for process in self.processes() if _is(process, part)]

    def kill(self, part: Part) -> None:
        """SIGKILL for every process that is this part of the run."""
        victims = self.find(part)
        assert victims, f"there is no {part} to kill"
        for process in victims:
            process.send_signal(signal.SIGKILL)
        if part == "flow":
            self.finish()

    def wait_for_stop(self, part: Part) -> psutil.Process:
        """Wait until a process of this part is stopped by SIGSTOP; that process, to be resumed."""
        self.wait_for(lambda store: any(p.status() == psutil.STATUS_STOPPED for p in self.find(part)))
        return next(p for p in self.find(part) if p.status() == psutil.STATUS_STOPPED)

    def orphans(self, seconds: float = 5.0) -> list[list[str]]:
        """Command lines of the processes that are still there after so long."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return [_command_line(process) for process in left]

    def log(self, name: str) -> str:
        path = Path(self.recipe["storage"]["root"]) / self.recipe["run_id"] / "logs" / f"{name}.log"
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""

    def clean_up(self) -> None:
        """Leave no process behind, whatever the test did."""
        for process in self.processes():
            process.kill()
        if self.process is not None:
            self.process.wait(10)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, section by section; it shares nothing with either, so a test may change it."""
    result = deepcopy(dict(base))
    for key, value in over.items():
        result[key] = merged(result.get(key, {}), value) if isinstance(value, Mapping) else deepcopy(value)
    return result


def interpreter_that_starts_the_model_engine(directory: Path) -> Path:
    """A script for `pool.python`: called as `python -m vllm.entrypoints.openai.api_server …`, it starts our engine."""
    engine = f'exec "{sys.executable}" "{model_engine.__file__}" "$@"'
    return script(directory / "engine-python", f'export PYTHONPATH="{REPOSITORY}"\nshift 2\n{engine}\n')


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
    return path


def _is(process: psutil.Process, part: Part) -> bool:
    words = _command_line(process)
    if part == "engine":
        return model_engine.__file__ in words or "vllm.entrypoints.openai.api_server" in words
    return store_faults.part_of(words) == part


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def assert_one_sentence(errors: str) -> None:
    """The last thing said is one line of ours, and nothing looks like a fault of the program."""
    last = errors.rstrip().splitlines()[-1]
    assert last.startswith("forebay: "), errors
    assert "Traceback" not in errors


def steps_done(step: int) -> Predicate:
    """The ledger of the living history has reached this step."""
    return lambda store: (footer := newest_step(store)) is not None and footer.name.step >= step


def newest_step(store: ObjectStore) -> LedgerFooter | None:
    return newest_footer(store, steps_only=True)


def checkpoint_committed(step: int) -> Predicate:
    return lambda store: any(name.step >= step for name in committed(store))


def newest_manifest(store: ObjectStore) -> Manifest:
    """The newest checkpoint, every byte of it verified."""
    newest = committed(store)[-1]
    return verify(store, newest.attempt, newest.step)
