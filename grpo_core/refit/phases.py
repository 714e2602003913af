"""One phase after the other on several engines at once, each with its deadline; whoever fails one is out.

Invariants: a phase ends when every engine has answered, failed or overrun; an engine that failed takes no part in the
phases after it and is reported with the phase and the cause; what is not an engine's failure is a bug of ours, and ends
the phase only after every call in flight has ended, so that none can touch an engine behind our back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Literal

from grpo_core.refit.canary import CanaryFailed
from grpo_core.refit.control import ControlError, EngineControl
from grpo_core.refit.transfer import TransferError
from grpo_core.rollout.wire import InvalidGeneration

Phase = Literal["connect", "pause", "start", "transfer", "finish", "resume", "canary"]
# What an engine can do wrong. Anything else is a bug of ours and ends the refit (engines are resumed all the same).
ENGINE_FAILURES = (ControlError, TransferError, CanaryFailed, InvalidGeneration)
# An engine's call ends by its own deadline; this much later it is no longer waited for.
GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class BrokenEngine:
    """An engine that does not carry the new weights for certain: eject and replace it."""

    name: str
    phase: Phase
    cause: str


@dataclass
class Phases:
    """Who is alive, who broke and why, and how long each phase took. `fence` is asked before each phase, and raises
    Fenced when the engines belong to a newer attempt."""

    engines: Mapping[str, EngineControl]
    fence: Callable[[], None] = lambda: None
    alive: list[str] = field(init=False)
    broken: list[BrokenEngine] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.alive = list(self.engines)

    def run(
        self,
        phase: Phase,
        deadline_seconds: float,
        call: Callable[[EngineControl], None],
        *,
        names: Sequence[str] | None = None,
        parallel: bool = True,
    ) -> None:
        """Call for each engine (default: those alive); the engines it fails on are broken."""
        self.fence()
        names = list(self.alive if names is None else names)
        began = time.monotonic()
        pool = ThreadPoolExecutor(max_workers=max(1, len(names) if parallel else 1), thread_name_prefix=phase)
        try:
            futures = {name: pool.submit(call, self.engines[name]) for name in names}
            for position, (name, future) in enumerate(futures.items(), start=1):
                turns = 1 if parallel else position
                patience = began + turns * deadline_seconds + GRACE_SECONDS - time.monotonic()
                try:
                    future.result(timeout=max(0.0, patience))
                except FutureTimeout:
                    self._break(name, phase, f"no end after {deadline_seconds:g} s")
                except ENGINE_FAILURES as error:
                    self._break(name, phase, str(error))
        except BaseException:
            # Before engines are resumed no call may be left that could pause one again.
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        pool.shutdown(wait=False, cancel_futures=True)
        self.seconds[phase] = time.monotonic() - began

    def _break(self, name: str, phase: Phase, cause: str) -> None:
        if name in self.alive:
            self.alive.remove(name)
            self.broken.append(BrokenEngine(name, phase, cause))
