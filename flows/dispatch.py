"""The leases of one attempt that are being generated: started, taken in, sealed when they fail or expire.

Invariants: a lease ends by its last part, the task's own or our seal, and only then are its missing ordinals leased
again; every ordinal a sealed lease gives back has failed once more, and beyond its budget it becomes a tombstone
instead of being tried for ever, unless there was no engine to ask or tools hang, which is no fault of a prompt;
failures in a row, without one good group between them, end the run with the cause that came first.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from flows.control import Control, Dispatched
from flows.generate import LeaseJob, LeaseResult
from flows.leasing import Leasing
from grpo_core.prompts import Prompts
from grpo_core.rollout.concurrency import CallsHang
from grpo_core.rollout.group import Generator
from grpo_core.rollout.pool import NoEngine
from grpo_core.schedule.tolerance import Tolerance
from storage.trajectories import TrajectoryStore

# Prefect and the local control both have this many threads for tasks; some watch processes.
MOST_LEASES = 200


@dataclass(frozen=True, slots=True)
class OpenLease:
    """A dispatched lease. `expired` tells its task that it was sealed; `deadline` is on the monotonic clock."""

    job: LeaseJob
    future: Dispatched[LeaseResult]
    expired: threading.Event
    deadline: float


@dataclass
class Dispatcher:
    """Keeps the window full. `stop` ends every task; `on_tokens` hears of generated tokens, on the tasks' threads."""

    leasing: Leasing
    trajectories: TrajectoryStore
    generator: Generator
    stream: Prompts
    control: Control
    on_tokens: Callable[[int], None]
    stop: threading.Event = field(default_factory=threading.Event)
    open: dict[int, OpenLease] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tolerance = Tolerance(self.generator.config.grpo.async_grpo.max_generation_failures)

    def dispatch(self) -> None:
        """Start as many leases as the window has room for."""
        generation = self.generator.config.generation
        while len(self.open) < MOST_LEASES:
            record = self.leasing.next_lease(self.generator.config.lease_prompts)
            if record is None:
                return
            expired = threading.Event()
            job = LeaseJob(
                record=record,
                generator=self.generator,
                stream=self.stream,
                trajectories=self.trajectories,
                stopped=partial(_any_set, expired, self.stop),
                on_tokens=self.on_tokens,
                warn=self.control.warn,
            )
            deadline = time.monotonic() + generation.lease_timeout_seconds
            self.open[record.lease] = OpenLease(job, self.control.dispatch(job), expired, deadline)

    def collect(self) -> None:
        """Take in what has finished; seal what failed or expired. Raise TooManyFailures."""
        for number, lease in list(self.open.items()):
            if not lease.future.done():
                if time.monotonic() > lease.deadline:
                    lease.expired.set()
                    self._seal(lease, "expired")
                continue
            try:
                result = lease.future.result()
            except Exception as error:  # noqa: BLE001 - whatever a task raises comes back here, and costs its lease alone
                blame = not isinstance(error, NoEngine | CallsHang)
                self._seal(lease, f"failed ({type(error).__name__}: {error})", blame=blame)
                continue
            del self.open[number]
            self.leasing.arrived(number, result.arrived)
            failed = sum(result.failures.values())
            if failed < len(result.arrived):
                self._tolerance.succeeded()
            elif failed:
                self._tolerance.failed(next(iter(result.failures)), failed)

    def _seal(self, lease: OpenLease, why: str, *, blame: bool = True) -> None:
        """End a lease in place of its task. Its last part says which ordinals go back; `blame` counts that against
        them."""
        record = lease.job.record
        del self.open[record.lease]
        if self.stop.is_set():
            return
        footer = self.trajectories.seal(record.lease, record.ordinals)
        arrived = set(record.ordinals) - set(footer.returned)
        self.leasing.arrived(record.lease, arrived)
        self.leasing.gave_back(record.lease, footer.returned, failed=blame)
        self.control.warn(f"lease {record.lease} {why}; {len(footer.returned)} of its ordinals are leased again")
        if arrived:
            self._tolerance.succeeded()
        else:
            self._tolerance.failed(f"lease {record.lease} {why}")


def _any_set(*events: threading.Event) -> bool:
    return any(event.is_set() for event in events)
