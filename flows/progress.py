"""Where a run is, as plain numbers: what the live view, the artifacts and the progress record all show."""

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo_core.evaluation import Evaluation
from storage.ledger import LedgerFooter

# Rates and utilisation are those of the last minute: long enough to be calm, short enough to show a change.
HORIZON_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Progress:
    """One moment of a run. Utilisations are shares of the last minute; times are in seconds; `evaluation` is the newest
    of this attempt."""

    run_id: str
    phase: str
    attempt: int
    step: int
    steps: int
    version: int
    reward: float | None
    lag_mean: float
    lag_max: int
    tokens_per_second: float
    trainer_utilisation: float
    engine_utilisation: float
    in_flight: int
    buffered: int
    eta_seconds: float | None
    elapsed_seconds: float
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    history: tuple[Mapping[str, float | None], ...] = ()
    evaluation: Evaluation | None = None


class Meter:
    """Turns events into rates. All methods take the time, so a test can choose it. Thread-safe: tasks add, we read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: deque[tuple[float, float]] = deque()
        self._engine: deque[tuple[float, float]] = deque()
        self._held: deque[tuple[float, float]] = deque()
        self._steps: deque[tuple[float, float]] = deque()
        self._arrived: float | None = None
        self._began: float | None = None
        self._sampled: float | None = None

    def tokens(self, count: int, now: float) -> None:
        """A group with so many tokens has been finished."""
        self._add(self._tokens, now, count)
        self._arrived = now

    def sample(self, now: float, *, busy: bool, window_full: bool = False) -> None:
        """Whether any request is in flight, and if not, whether that is because the window has no room; the time since
        the last sample counts as such."""
        self._began = now if self._began is None else self._began
        passed = 0.0 if self._sampled is None else now - self._sampled
        self._add(self._engine, now, passed if busy else 0.0)
        self._add(self._held, now, passed if window_full and not busy else 0.0)
        self._sampled = now

    def step(self, footer: LedgerFooter, now: float) -> None:
        self._add(self._steps, now, footer.metrics.get("step_seconds") or 0.0)

    def _add(self, events: deque[tuple[float, float]], now: float, amount: float) -> None:
        with self._lock:
            events.append((now, amount))
            while events and now - events[0][0] > HORIZON_SECONDS:
                events.popleft()

    def _recent(self, events: deque[tuple[float, float]], now: float) -> list[tuple[float, float]]:
        with self._lock:
            return [(at, amount) for at, amount in events if now - at <= HORIZON_SECONDS]

    def _rate(self, events: deque[tuple[float, float]], now: float) -> float:
        span = min(HORIZON_SECONDS, now - (self._began if self._began is not None else now))
        return sum(amount for _, amount in self._recent(events, now)) / span if span > 0 else 0.0

    def tokens_per_second(self, now: float) -> float:
        return self._rate(self._tokens, now)

    def trainer_utilisation(self, now: float) -> float:
        return min(1.0, self._rate(self._steps, now))

    def engine_utilisation(self, now: float) -> float:
        return min(1.0, self._rate(self._engine, now))

    def metrics(self, now: float) -> dict[str, float]:
        """What it knows of the pool, by the names of the registry."""
        return {
            "pool/utilisation": self.engine_utilisation(now),
            "pool/held_back": min(1.0, self._rate(self._held, now)),
            "pool/tokens_per_second": self.tokens_per_second(now),
        } | ({} if self._arrived is None else {"pool/silent_seconds": now - self._arrived})

    def seconds_per_step(self, now: float) -> float | None:
        """Over the last minute; None before two steps."""
        recent = [at for at, _ in self._recent(self._steps, now)]
        return (recent[-1] - recent[0]) / (len(recent) - 1) if len(recent) > 1 else None
