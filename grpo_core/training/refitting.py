"""Which engines of the pool carry the trainer's weights, and the refits by which they come to.

Invariants: all engines that carry a version carry the same bytes; an engine is in no refit again under its name once
it broke in one; every refit that some engine took is recorded in the store before anything else happens because of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from grpo_core.config import RunConfig
from grpo_core.refit.control import EngineAddress
from grpo_core.refit.coordinator import BrokenEngine, RefitFailed, RefitResult
from grpo_core.training.commands import IDLE_SECONDS, Command, Idle, Refit, TrainerStuck
from grpo_core.training.feed import BufferedGroup
from grpo_core.trajectory import Stamp
from storage.objects import ObjectStore
from storage.pool import RefitRecord, read_pool_changes, write_refit


class Refitting:
    """Rank 0's view of the pool. `distrusted` maps each engine that broke to the version it may not have kept."""

    def __init__(
        self,
        *,
        config: RunConfig,
        store: ObjectStore,
        attempt: int,
        fence: Callable[[], None],
        stopping: Callable[[], bool],
        report: Callable[[dict[str, Any]], None],
    ) -> None:
        self._store = store
        self._attempt = attempt
        self._fence = fence
        self._stopping = stopping
        self._report = report
        self._limit = config.pool.longest_outage_seconds + config.refit.transfer_timeout_seconds
        self.distrusted: dict[str, int] = {}
        self._engines: dict[str, EngineAddress] = {}
        self._carrying: set[str] = set()
        self._step = -1  # after which the weights were that they carry
        self._leases_before: dict[str, int] = {}  # engine → the newest lease at its last refit
        self._broken: dict[str, str] = {}
        self._changes = -1
        self._unreported: list[tuple[RefitResult, float]] = []

    def lacking(self, step: int) -> bool:
        """Whether an engine lacks our weights and may be given them after `step`. Between refits they can be newer than
        the version that the others carry, and one version must be one set of weights: then it waits for the next."""
        self._follow_pool()
        return bool(self._engines.keys() - self._carrying) and (step == self._step or not self._carrying)

    def refit(self, stamp: Stamp, step: int, last_lease: int) -> Generator[Command, Any, None]:
        """Bring every engine of the pool that lacks them to the weights after `step`; wait for an engine while none has
        them. Raises TrainerStuck when none took them in the time that the pool has to bring one
        and that one to load."""
        began = progress = time.monotonic()
        if step != self._step:
            self._carrying.clear()
            self._step = step
        while not self._stopping():
            self._follow_pool()
            engines = tuple(engine for name, engine in self._engines.items() if name not in self._carrying)
            if engines:
                self._fence()
                result: RefitResult | RefitFailed = yield Refit(stamp, engines)
                self._note_broken(stamp, result.broken)
                if isinstance(result, RefitResult):
                    self._note_refitted(result, step, last_lease, time.monotonic() - began)
                if self._carrying:
                    return
            if time.monotonic() - progress > IDLE_SECONDS:
                self._fence()
                yield Idle()
                progress = time.monotonic()
            if time.monotonic() - began > self._limit:
                causes = "; ".join(f"{name}: {cause}" for name, cause in list(self._broken.items())[-1:])
                raise TrainerStuck(
                    f"no engine took the weights {stamp} within {self._limit:g} s; look at the engines' logs{causes and f', the last broke in {causes}'}"
                )
            time.sleep(self._store.poll_seconds)

    def doubt(self, group: BufferedGroup) -> None:
        """A group of this attempt from weights outside the living history: its engines have not kept ours, whatever we
        believe, and the next refit includes them. What was leased before an engine's last refit
        says nothing about it."""
        if group.foreign and group.part.attempt == self._attempt:
            self._carrying -= {name for name in group.engines if group.part.lease > self._leases_before.get(name, -1)}

    def take_results(self) -> list[tuple[RefitResult, float]]:
        """The refits since the last call, each with the seconds for which the trainer was held up."""
        taken, self._unreported = self._unreported, []
        return taken

    def _follow_pool(self) -> None:
        for change in read_pool_changes(self._store, self._attempt, after=self._changes):
            self._changes += 1
            for name in change.left:
                self._engines.pop(name, None)
                self._carrying.discard(name)
            self._engines |= {name: EngineAddress(name, url) for name, url in change.joined.items()}

    def _note_broken(self, stamp: Stamp, engines: Sequence[BrokenEngine]) -> None:
        for broken in engines:
            self._engines.pop(broken.name)
            self._broken[broken.name] = f"{broken.phase}: {broken.cause}"
            self.distrusted[broken.name] = stamp.version
        # All of them, ever: the report is overwritten, and a name is never used for two engines.
        self._report({"broken_engines": dict(self._broken)})

    def _note_refitted(self, result: RefitResult, step: int, last_lease: int, seconds: float) -> None:
        """Say in the store, and then to whoever watches, which engines carry the weights after `step`."""
        self._unreported.append((result, seconds))
        self._carrying |= set(result.refitted)
        self._leases_before |= dict.fromkeys(result.refitted, last_lease)
        version = result.stamp.version
        write_refit(
            self._store,
            RefitRecord(self._attempt, version, step, result.refitted, result.seconds, result.canary, result.bytes),
        )
        canary = max(result.canary.values(), default=0.0)
        self._report({"refit": {"version": version, "seconds": seconds, "canary": canary}})
