"""The refit: new weights into every engine of the pool, or a named reason why not. Runs in trainer rank 0.

    connect → pause → start → transfer → finish(stamp) → resume → canary

Invariants:
- Nothing is touched before the weights are gathered, complete and finite.
- Each phase has a deadline per engine. An engine that fails any phase takes no part in the later ones and is
  reported as broken: the caller ejects and replaces it. The others go on.
- Whatever happens, of the engines that were paused those whose `finish` succeeded and those that were never
  sent `start` are resumed. One between the two may be half-written: vLLM cannot undo that, so it stays paused.
- A process that was asleep while a newer attempt took its run over finds no phase open to it: it neither names, nor
  resumes, nor stops an engine that may carry that attempt's weights by now.
- An engine carries the stamp it was given (read back in `finish`), and its log-probs are the trainer's (canary).

The canary comes after `resume` because a paused engine queues every request, the canary too. An engine that
fails it is paused again with its requests aborted; what it sampled since `resume` carries the new stamp and
must not be trained on: the caller discards what engine and stamp name.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Literal

import torch

from grpo_core.refit.canary import Canary, CanaryFailed, check_canary
from grpo_core.refit.control import ControlError, EngineAddress, EngineControl
from grpo_core.refit.transfer import Transfer, TransferError, Weights
from grpo_core.rollout.wire import InvalidGeneration
from grpo_core.trajectory import Stamp

Phase = Literal["connect", "pause", "start", "transfer", "finish", "resume", "canary"]
# What an engine can do wrong. Anything else is a bug of ours and ends the refit (engines are resumed all the same).
ENGINE_FAILURES = (ControlError, TransferError, CanaryFailed, InvalidGeneration)
# An engine's call ends by its own deadline; this much later the coordinator stops waiting for it.
GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitSettings:
    """Deadlines in seconds for one engine in each phase, and how the pool is paused.

    `pause_mode` keep: requests in flight go on under the new weights; wait: they end first; abort: they end now.
    `clear_cache` recomputes keys and values of kept requests; without it they stay those of the old weights.
    """

    connect_seconds: float
    pause_seconds: float
    start_seconds: float
    transfer_seconds: float
    finish_seconds: float
    resume_seconds: float
    canary_seconds: float
    pause_mode: Literal["keep", "wait", "abort"]
    clear_cache: bool
    digests: bool


@dataclass(frozen=True, slots=True)
class BrokenEngine:
    """An engine that does not carry the new weights for certain: eject and replace it."""

    name: str
    phase: Phase
    cause: str


@dataclass(frozen=True, slots=True)
class RefitResult:
    """What a refit did. `seconds` per phase; `canary` is the largest difference (nats) to the trainer per engine."""

    stamp: Stamp
    refitted: tuple[str, ...]
    broken: tuple[BrokenEngine, ...]
    seconds: dict[str, float]
    canary: dict[str, float]


class RefitFailed(RuntimeError):
    """No engine of the pool carries the new weights. `broken` holds every engine with phase and cause."""

    def __init__(self, stamp: Stamp, broken: Sequence[BrokenEngine]) -> None:
        first = broken[0]
        super().__init__(
            f"the refit to {stamp} failed on all {len(broken)} engines; "
            f"first {first.name} in phase {first.phase}: {first.cause}"
        )
        self.broken = tuple(broken)


def refit_weights(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    engines: Sequence[EngineAddress],
    stamp: Stamp,
    transfer: Transfer,
    settings: RefitSettings,
    *,
    canary: Canary | None,
    fence: Callable[[], None] = lambda: None,
    control: Callable[[EngineAddress], EngineControl] = EngineControl,
) -> RefitResult:
    """Move the gathered weights into `engines` and name them `stamp`. `fence` raises Fenced when a newer attempt owns
    the run, and with it the engines.

    Raises ManifestError before any engine is touched when the weights are incomplete or not finite, and
    RefitFailed when no engine is left. Links of engines that are no longer listed are the caller's to close.
    """
    if not engines:
        raise ValueError(f"the refit to {stamp} has no engine; give at least one")
    weights = Weights.of(named_tensors, digests=settings.digests)
    round_ = _Round(stamp, {engine.name: control(engine) for engine in engines}, settings, fence)
    try:
        round_.run_transfer(transfer, weights)
    finally:
        round_.resume()
    if canary is not None:
        round_.check(canary)
    for engine in round_.broken:
        transfer.close(engine.name)
    if not round_.alive:
        raise RefitFailed(stamp, round_.broken)
    return RefitResult(stamp, tuple(round_.alive), tuple(round_.broken), round_.seconds, round_.differences)


@dataclass
class _Round:
    """The state of one refit: who is alive, who was sent `pause` and `start`, who finished, who broke and why."""

    stamp: Stamp
    engines: dict[str, EngineControl]
    settings: RefitSettings
    fence: Callable[[], None]
    alive: list[str] = field(init=False)
    paused: set[str] = field(default_factory=set)
    started: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)
    broken: list[BrokenEngine] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.alive = list(self.engines)

    def run_transfer(self, transfer: Transfer, weights: Weights) -> None:
        """All phases in which engines stand still, and the connecting before them."""
        settings = self.settings

        def connect(engine: EngineControl) -> None:
            if not transfer.is_open(engine.name):
                transfer.open(engine, settings.connect_seconds)

        def pause(engine: EngineControl) -> None:
            self.paused.add(engine.name)
            engine.pause(settings.pause_mode, settings.clear_cache, settings.pause_seconds)

        def start(engine: EngineControl) -> None:
            self.started.add(engine.name)
            engine.start(settings.start_seconds)

        def finish(engine: EngineControl) -> None:
            engine.finish(str(self.stamp), settings.finish_seconds)
            carried = engine.weight_stamp(settings.finish_seconds)
            if carried != str(self.stamp):
                raise ControlError(f"engine {engine.name} carries {carried} after it was given {self.stamp}")
            self.finished.add(engine.name)

        self._each("connect", settings.connect_seconds, connect, parallel=transfer.concurrent)
        self._each("pause", settings.pause_seconds, pause)
        self._each("start", settings.start_seconds, start)
        self._each(
            "transfer",
            settings.transfer_seconds,
            lambda engine: transfer.send(engine, weights, settings.transfer_seconds),
            parallel=transfer.concurrent,
        )
        self._each("finish", 2 * settings.finish_seconds, finish)

    def resume(self) -> None:
        """Resume every paused engine that is whole: finished, or never sent `start`."""
        touched = self.started - self.finished
        whole = [name for name in self.engines if name in self.paused and name not in touched]
        self._each(
            "resume",
            self.settings.resume_seconds,
            lambda engine: engine.resume(self.settings.resume_seconds),
            names=whole,
        )

    def check(self, canary: Canary) -> None:
        """Compare every engine with the trainer; stop those that differ."""

        def check(engine: EngineControl) -> None:
            salt = f"canary {uuid.uuid4()}"
            try:
                scores = engine.score(list(canary.token_ids), salt, self.settings.canary_seconds)
                self.differences[engine.name] = check_canary(engine.name, canary, scores)
            except ENGINE_FAILURES:
                self.fence()
                engine.pause("abort", True, self.settings.pause_seconds)
                raise

        self._each("canary", self.settings.canary_seconds + self.settings.pause_seconds, check)

    def _each(
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
