"""What each step measured: the figures in the ledger's footers, joined with the refits that followed the steps, and
what the flow measured when it saw them.

Contract: of the ledger only the ends of files and small records are read, never rows; of metrics/, a bounded number of
chunks. Metrics that a step did not have, or that were not finite, are missing.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from storage.layout import LedgerName, MetricsName
from storage.ledger import read_ledger_footer
from storage.metrics import CHUNK_STEPS, read_values
from storage.objects import PARALLEL_REQUESTS, ObjectStore
from storage.pool import RefitRecord, read_refit

MOST_CHUNKS = 40


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One step. `refit`: the one that followed it, if one did and is complete."""

    name: LedgerName
    metrics: Mapping[str, float]
    refit: RefitRecord | None

    @property
    def wait_seconds(self) -> float:
        return self.metrics.get("wait_seconds", 0.0)

    @property
    def step_seconds(self) -> float:
        return self.metrics.get("step_seconds", 0.0)

    @property
    def refit_seconds(self) -> float:
        return 0.0 if self.refit is None else sum(self.refit.seconds.values())

    @property
    def seconds(self) -> float:
        """The measured parts of the step's wall time."""
        return self.wait_seconds + self.step_seconds + self.refit_seconds

    @property
    def generated_tokens(self) -> float:
        """Tokens of the trained groups, stale ones included."""
        fresh = 1.0 - self.metrics.get("masked_token_share", 0.0)
        return self.metrics.get("trained_tokens", 0.0) / fresh if fresh > 0 else 0.0


def step_points(store: ObjectStore, names: Sequence[LedgerName], *, every_steps: int) -> list[StepPoint]:
    """The points of these step files, in their order. Raise ObjectMissing or DamagedShard."""

    def read(name: LedgerName) -> StepPoint:
        footer = read_ledger_footer(store, name)
        metrics = {key: value for key, value in footer.metrics.items() if value is not None}
        due = name.step % every_steps == 0
        return StepPoint(name, metrics, read_refit(store, name.attempt, name.step // every_steps) if due else None)

    with ThreadPoolExecutor(PARALLEL_REQUESTS) as readers:
        return list(readers.map(read, names))


def flow_points(store: ObjectStore, names: Sequence[LedgerName], metrics: Sequence[str]) -> dict[str, dict[int, float]]:
    """Metric → step → its value, of those that the flow measured when it saw these steps of one history."""
    chunks = sorted({MetricsName(name.attempt, name.step // CHUNK_STEPS) for name in names})
    chosen = [chunks[index] for index in spread(len(chunks), MOST_CHUNKS)]
    known = {(name.attempt, name.step) for name in names}
    found: dict[str, dict[int, float]] = {}
    with ThreadPoolExecutor(PARALLEL_REQUESTS) as readers:
        values = readers.map(lambda chunk: read_values(store, chunk, metrics), chosen)
        for chunk, rows in zip(chosen, values, strict=True):
            for step, metric, value in rows:
                if (chunk.attempt, step) in known:
                    found.setdefault(metric, {})[step] = value
    return found


def spread(count: int, at_most: int) -> list[int]:
    """Up to `at_most` positions in range(count), evenly spread, the first and the last among them."""
    if count <= at_most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (at_most - 1)) for i in range(at_most)})
