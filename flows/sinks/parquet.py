"""The sink that every run has: `metrics/` in its store, for DuckDB, polars or pandas.

Contract: a chunk of steps is read once, kept, and written whole now and then, so a crash costs the last seconds; the
next attempt makes up for them from the ledger.
"""

import time
from collections.abc import Callable

from storage.metrics import Point, complete, read_points, write_points
from storage.objects import ObjectStore

WRITE_SECONDS = 20.0


class ParquetSink:
    """Writes every point to its chunk."""

    def __init__(self, store: ObjectStore, *, every_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._every_steps = every_steps
        self._clock = clock
        self._completed = 0
        self._points: list[Point] = []
        self._unwritten = False
        self._due = clock() + WRITE_SECONDS

    def write(self, point: Point) -> None:
        """Take a point; write the chunk when another one begins, or when it is time."""
        if not self._points or self._points[0].chunk != point.chunk:
            self.close()
            self._points = read_points(self._store, point.chunk)
        self._points.append(point)
        self._unwritten = True
        while self._completed < point.attempt - 1:
            complete(self._store, self._completed + 1, every_steps=self._every_steps)
            self._completed += 1
        if self._clock() >= self._due:
            self.close()

    def close(self) -> None:
        """Write what is not written yet."""
        if self._unwritten:
            write_points(self._store, self._points[0].chunk, self._points)
            self._unwritten = False
        self._due = self._clock() + WRITE_SECONDS
