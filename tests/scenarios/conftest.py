"""One made policy for all scenarios, and runs that leave no process behind."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.run_driver import RunDriver

MakeDriver = Callable[..., RunDriver]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the policy is made once."""
    return tmp_path_factory.mktemp("policies")


@pytest.fixture
def make_driver(tmp_path: Path, cache: Path) -> Iterator[MakeDriver]:
    """Makes a driver of a run in a directory of its own; what it left running ends with the test."""
    drivers: list[RunDriver] = []

    def make(name: str = "run", settings: dict[str, Any] | None = None) -> RunDriver:
        drivers.append(RunDriver(tmp_path / name, cache, settings or {}))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.clean_up()


@pytest.fixture
def driver(make_driver: MakeDriver) -> RunDriver:
    """A run of the plain recipe."""
    return make_driver()
