"""A small sample of `make torture`."""

from __future__ import annotations

from pathlib import Path

from tests import torture

KILL_POINTS = 5


def test_runs_killed_at_random_instants_lose_nothing_and_repeat_nothing(tmp_path: Path) -> None:
    results = torture.fake_runs(seed=0, wanted=KILL_POINTS, directory=tmp_path)
    assert sum(len(result.killed) for result in results) >= KILL_POINTS
    assert all(result.sound for result in results), torture.table(results)
