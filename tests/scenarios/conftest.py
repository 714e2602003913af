"""One made policy for all scenarios, runs that leave no process behind, and what synchronous ones must come to."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import sequential
from tests.scenarios.run_driver import SYNCHRONOUS, RunDriver
from tests.scenarios.scenario_rewards import even_share

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


@pytest.fixture
def synchronous(make_driver: MakeDriver) -> RunDriver:
    """A run with a window of 0."""
    return make_driver(settings=SYNCHRONOUS)


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[str, torch.Tensor]:
    """Weights and moments of a synchronous run after its last step, computed by the plain loop."""
    driver = RunDriver(tmp_path_factory.mktemp("sequential"), cache, SYNCHRONOUS)
    return sequential.train(driver.config, driver.policy(), even_share, steps=driver.config.grpo.max_num_steps)
