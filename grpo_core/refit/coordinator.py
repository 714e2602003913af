"""The refit: new weights into every engine of the pool, or a named reason why not. Runs in trainer rank 0.

    prepare → connect → pause → start → transfer → finish(stamp) → resume → canary

Invariants:
- Nothing is touched before the weights are gathered, complete, finite, and prepared for their way.
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
from dataclasses import dataclass, field
from typing import Literal

import torch

from grpo_core.refit.canary import Canary, CanaryFailed, check_canary
from grpo_core.refit.control import ControlError, EngineAddress, EngineControl
from grpo_core.refit.phases import ENGINE_FAILURES, BrokenEngine, Phases
from grpo_core.refit.transfer import Transfer, Weights
from grpo_core.trajectory import Stamp


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
class RefitResult:
    """What a refit did. `seconds` per phase; `canary` is the largest difference (nats) to the trainer per engine;
    `bytes` is what each engine received."""

    stamp: Stamp
    refitted: tuple[str, ...]
    broken: tuple[BrokenEngine, ...]
    seconds: dict[str, float]
    canary: dict[str, float]
    bytes: int = 0


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

    Raises ManifestError before any engine is touched when the weights are incomplete or not finite, StorageError when
    a transfer through the store cannot put them there, and RefitFailed when no engine is left. Links of engines that
    are no longer listed are the caller's to close.
    """
    if not engines:
        raise ValueError(f"the refit to {stamp} has no engine; give at least one")
    began = time.monotonic()
    weights = Weights.of(named_tensors, digests=settings.digests)
    received = transfer.prepare(weights, stamp)
    round_ = _Round(stamp, Phases({engine.name: control(engine) for engine in engines}, fence), settings)
    round_.phases.seconds["prepare"] = time.monotonic() - began
    try:
        round_.run_transfer(transfer, weights)
    finally:
        round_.resume()
    if canary is not None:
        agreed = canary

        def check(engine: EngineControl) -> float:
            salt = f"canary {uuid.uuid4()}"
            return check_canary(
                engine.name, agreed, engine.score(list(agreed.token_ids), salt, settings.canary_seconds)
            )

        check_engines(round_.phases, check, settings, round_.differences)
    phases = round_.phases
    for engine in phases.broken:
        transfer.close(engine.name)
    if not phases.alive:
        raise RefitFailed(stamp, phases.broken)
    return RefitResult(
        stamp, tuple(phases.alive), tuple(phases.broken), phases.seconds, round_.differences, bytes=received
    )


@dataclass
class _Round:
    """The state of one refit: who was sent `pause` and `start`, and who finished."""

    stamp: Stamp
    phases: Phases
    settings: RefitSettings
    paused: set[str] = field(default_factory=set)
    started: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)
    differences: dict[str, float] = field(default_factory=dict)

    def run_transfer(self, transfer: Transfer, weights: Weights) -> None:
        """All phases in which engines stand still, and the connecting before them."""
        settings, run = self.settings, self.phases.run

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

        run("connect", settings.connect_seconds, connect, parallel=transfer.concurrent)
        run("pause", settings.pause_seconds, pause)
        run("start", settings.start_seconds, start)
        run(
            "transfer",
            settings.transfer_seconds,
            lambda engine: transfer.send(engine, weights, settings.transfer_seconds),
            parallel=transfer.concurrent,
        )
        run("finish", 2 * settings.finish_seconds, finish)

    def resume(self) -> None:
        """Resume every paused engine that is whole: finished, or never sent `start`."""
        touched = self.started - self.finished
        whole = [name for name in self.phases.engines if name in self.paused and name not in touched]
        self.phases.run(
            "resume",
            self.settings.resume_seconds,
            lambda engine: engine.resume(self.settings.resume_seconds),
            names=whole,
        )


def check_engines(
    phases: Phases,
    check: Callable[[EngineControl], float],
    settings: RefitSettings,
    differences: dict[str, float],
) -> None:
    """Compare every engine with the trainer; stop those that differ.
    `check` returns the largest difference, or raises."""

    def check_or_stop(engine: EngineControl) -> None:
        """What fails is paused at once: it must not sample from weights that are not the trainer's."""
        try:
            differences[engine.name] = check(engine)
        except ENGINE_FAILURES as failure:
            phases.fence()
            try:
                engine.pause("abort", True, settings.pause_seconds)
            except ControlError as second:
                raise CanaryFailed(f"{failure}; and it could not be stopped: {second}") from failure
            raise

    phases.run("canary", settings.canary_seconds + settings.pause_seconds, check_or_stop)
