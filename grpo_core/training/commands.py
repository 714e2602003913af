"""What rank 0 asks of all ranks. A command is plain data and a collective: every rank carries it out, in step."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from grpo_core.refit.control import EngineAddress
from grpo_core.training.step import StepPlan
from grpo_core.trajectory import Stamp

# The other ranks wait in a collective; a command at least this often tells them that rank 0 is alive.
IDLE_SECONDS = 20.0


class TrainerStuck(RuntimeError):
    """Nothing that the next command needs arrived within the deadline; the message names what was waited for."""


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to do yet."""


@dataclass(frozen=True, slots=True)
class Step:
    plan: StepPlan


@dataclass(frozen=True, slots=True)
class Refit:
    """Move the weights into these engines as `stamp`. Result: RefitResult, or RefitFailed as a value."""

    stamp: Stamp
    engines: tuple[EngineAddress, ...]


@dataclass(frozen=True, slots=True)
class Save:
    """Write a checkpoint of step `step`, behind the commands that follow. `facts` is what the manifest keeps beside the
    tensors. Result: metrics of saves for the ledger, by name, in seconds."""

    step: int
    facts: dict[str, Any]


Command = Idle | Step | Refit | Save
Commands = Generator[Command, Any, None]
