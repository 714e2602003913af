"""One lease: its prompts become groups, its groups become parts. The Prefect task and, inside it, plain asyncio.

Invariants: what goes wrong in one group costs no other, be it foreseen or not; groups are flushed as they finish, so a
straggler holds back only its own group; the last part is marked `last`; a stopped lease leaves nothing half-written,
and what it did not finish is returned when the lease is sealed.
"""

import asyncio
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from grpo_core.prompts import Prompts
from grpo_core.rollout.concurrency import CallsHang, on_a_loop_of_its_own, unless_stopped
from grpo_core.rollout.group import Generator
from grpo_core.rollout.pool import NoEngine
from grpo_core.rollout.rows import FAILED
from storage import schema
from storage.leases import LeaseRecord
from storage.trajectories import TrajectoryStore


@dataclass(frozen=True, slots=True)
class LeaseResult:
    """What a lease came to. `failures`: cause → groups that failed for good; `arrived`: ordinals in its parts."""

    lease: int
    arrived: tuple[int, ...]
    parts: int
    tokens: int
    seconds: float
    failures: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LeaseJob:
    """Everything a generation task needs. `on_tokens` hears of generated tokens as groups finish, `warn` of what a
    person should look at; both on the task's thread."""

    record: LeaseRecord
    generator: Generator
    stream: Prompts
    trajectories: TrajectoryStore
    stopped: Callable[[], bool]
    on_tokens: Callable[[int], None]
    warn: Callable[[str], None]

    def run(self) -> LeaseResult:
        """Generate the lease. Raise LeaseStopped when told to stop, NoEngine, CallsHang, or an error of the store."""
        stopped = LeaseStopped(f"lease {self.record.lease} was stopped")
        return on_a_loop_of_its_own(unless_stopped(self._generate(), self.stopped, stopped))

    async def _group(self, ordinal: int, session: aiohttp.ClientSession) -> list[dict[str, Any]]:
        """The rows of one ordinal; a tombstone at once for one that has cost its leases too often.
        Raise NoEngine, CallsHang."""
        prompt = self.stream.prompt(ordinal)
        failures = self.record.failure_counts.get(ordinal, 0)
        if failures >= self.generator.config.generation.max_rollout_attempts:
            return self.generator.tombstone(prompt, f"{failures} leases with this prompt failed or expired")
        try:
            return await self.generator.group(prompt, session, attempt=self.record.attempt, lease=self.record.lease)
        except (NoEngine, CallsHang):
            raise
        except Exception as error:  # noqa: BLE001 - made again from the same seed it would only fail the other groups again
            self.warn(
                f"the group of ordinal {ordinal} failed unforeseen:\n{''.join(traceback.format_exception(error))}"
            )
            return self.generator.tombstone(prompt, f"{type(error).__name__}: {error}")

    async def _generate(self) -> LeaseResult:
        began = time.monotonic()
        config = self.generator.config
        # An engine batches only what has reached it, so nothing may wait for a connection.
        connector = aiohttp.TCPConnector(limit=0)
        arrived: list[int] = []
        failures: Counter[str] = Counter()
        parts, tokens = 0, 0
        async with aiohttp.ClientSession(connector=connector) as session:
            pending = {asyncio.create_task(self._group(ordinal, session)) for ordinal in self.record.ordinals}
            try:
                rows: list[dict[str, Any]] = []
                flushed = time.monotonic()
                while pending:
                    done, pending = await asyncio.wait(
                        pending, timeout=config.generation.flush_seconds, return_when=asyncio.FIRST_COMPLETED
                    )
                    for task in done:
                        group = task.result()
                        rows += group
                        arrived.append(group[0]["ordinal"])
                        failures.update({group[0]["error"]: 1} if group[0]["status"] == FAILED else {})
                        self.on_tokens(made := sum(sum(row["loss_mask"]) for row in group))
                        tokens += made
                    if rows and (not pending or time.monotonic() - flushed >= config.generation.flush_seconds):
                        table = schema.table(
                            [{"attempt": 0, "lease": 0, "part": 0, **row} for row in rows], schema.SHARD
                        )
                        await asyncio.to_thread(self.trajectories.append, self.record.lease, table, last=not pending)
                        rows, flushed, parts = [], time.monotonic(), parts + 1
            finally:
                for task in pending:
                    task.cancel()
        return LeaseResult(self.record.lease, tuple(arrived), parts, tokens, time.monotonic() - began, dict(failures))


class LeaseStopped(RuntimeError):
    """The lease was told to stop; what it had committed stays."""
