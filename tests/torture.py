"""Kill a run at random instants, continue it by the same command, and account for every prompt and token at its end.

    python -m tests.torture [--fake 200] [--real 20] [--seed 0]

`--fake` kill points hit runs whose engine is `tests/model_engine.py`, `--real` ones runs with vLLM on the CPU. A kill
point is a process and an instant: before or after a kind of write to the store, while a refit stands half-way, or
while generating. Several hit one run. The seed fixes recipes and kill points; what the machine makes of them is timing.
Prints one table, and exits with 1 if it shows anything but kill points.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from tests import sequential
from tests.scenarios.engines import running_engine
from tests.scenarios.run_driver import Part, RunDriver, merged
from tests.scenarios.scenario_rewards import even_share
from tests.scenarios.soundness import Account, account, assert_same_bits, assert_sound, checkpoint_tensors
from tests.scenarios.store_faults import Fault

KILLS_OF_A_RUN = 6
STALL = "stall_in_update"
SIDE_BY_SIDE = 2
# A command that neither ends nor comes to its kill point within this time hangs.
HANG_SECONDS = 600.0
REAL_ENGINE: dict[str, Any] = {
    "pool": {"python": None, "enforce_eager": True, "kv_cache_bytes": 1 << 26, "start_timeout_seconds": 400}
}
FLOW_WRITES = (
    r"create attempts/\d+\.json",
    r"put attempts/\d+\.flow",
    "create pool/",
    "create leases/",
    "create trajectories/",
    "create assets/",
)
TRAINER_WRITES = (
    "create refits/",
    r"put attempts/\d+\.trainer",
    r"create ledger/.*step-\d+\.parquet",
    r"create ledger/.*drops",
    "open checkpoints/",
    "create checkpoints/.*MANIFEST",
    "delete checkpoints/",
    "clear checkpoints/",
)


@dataclass(frozen=True, slots=True)
class KillPoint:
    """Which process dies when: at a fault of the store, or at one of the model engine (name, number).

    A fault that kills nobody itself says when we are to kill.
    """

    victim: Part
    store: Fault | None = None
    engine: tuple[str, int] | None = None

    @property
    def by_us(self) -> bool:
        return self.store.action != "kill" if self.store else self.engine is not None and self.engine[0] == STALL

    def __str__(self) -> str:
        if self.store is not None:
            return f"{self.victim} {self.store.moment} {self.store.write} number {self.store.occurrence}"
        return f"{self.victim} at {self.engine}"


@dataclass(frozen=True, slots=True)
class Plan:
    """One run: its recipe beside the common one, the kill points that wait for it,
    and how slowly its engine samples."""

    number: int
    settings: dict[str, Any]
    kill_points: tuple[KillPoint, ...]
    seconds_per_token: float = 0.0


@dataclass(slots=True)
class Result:
    """What became of a run. `faults` are sentences about what should not have been."""

    plan: Plan
    killed: list[KillPoint] = field(default_factory=list)
    account: Account = Account()
    hangs: int = 0
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        return self.account == Account() and not self.hangs and not self.faults


class Hang(Exception):
    """A command that goes on without coming to anything."""


def fake_plans(seed: int) -> Iterator[Plan]:
    """Runs with the model engine, without end."""
    for number in count():
        random = Random(f"{seed} fake {number}")
        settings = recipe_variant(random)
        kill_points = (*store_kill_points(random), *engine_kill_points(random))
        yield Plan(number, settings, kill_points, random.choice([0.0, 0.0, 0.02]))


def recipe_variant(random: Random) -> dict[str, Any]:
    """Settings that change who waits for whom, and what a killed process leaves behind."""
    window = random.choice([0, 1, 2])
    sampler = random.choice(["windowed", "in_order", "freshest"])
    return {
        "grpo": {
            "num_prompts_per_step": random.choice([2, 4]),
            "use_dynamic_sampling": window > 0 and random.choice([True, False]),
            "async_grpo": {
                "max_trajectory_age_steps": window,
                "sampler": sampler,
                # Waiting for the oldest and training the freshest first exclude each other.
                "stale_policy": random.choice(["mask", "drop"] if sampler == "freshest" else ["mask", "drop", "wait"]),
                "in_flight_weight_updates": random.choice([True, False]),
            },
        },
        "generation": {"lease_prompts": random.choice([1, 2, 3])},
        "packing": {"token_budget": random.choice([64, 128, 256]), "share_prefixes": window > 0},
        "checkpointing": {
            "save_period": random.choice([1, 2]),
            "keep_last": random.choice([1, 2]),
            "load_replay_buffer": random.choice([True, False]),
            "async_save": random.choice([True, False]),
        },
    }


def store_kill_points(random: Random) -> list[KillPoint]:
    """Flow and trainer, before and after their writes."""
    points = []
    for _ in range(KILLS_OF_A_RUN):
        victim: Any = random.choice(["flow", "trainer rank"])
        write = random.choice(FLOW_WRITES if victim == "flow" else TRAINER_WRITES)
        moment: Any = "before" if write.startswith("open") else random.choice(["before", "after"])
        points.append(KillPoint(victim, Fault(victim, write, moment, "kill", random.randint(1, 3))))
    return list(dict.fromkeys(points))


def engine_kill_points(random: Random) -> list[KillPoint]:
    """The model engine while it generates and while it takes weights, and anybody in the middle of a refit."""
    victim: Any = random.choice(["flow", "trainer rank", "torchrun", "engine"])
    points = [
        KillPoint("engine", engine=("die_at_request", random.randint(1, 12))),
        KillPoint("engine", engine=("die_in_update", random.randint(1, 3))),
        KillPoint(victim, engine=(STALL, random.randint(1, 4))),
    ]
    return random.sample(points, random.randint(0, len(points)))


def real_plans(seed: int) -> Iterator[Plan]:
    """Runs with vLLM, without end: one in four with an engine of its own, which is killed too."""
    for number in count():
        random = Random(f"{seed} real {number}")
        settings, kill_points = recipe_variant(random), store_kill_points(random)
        if number % 4 == 1:
            settings = merged(settings, REAL_ENGINE)
            commit = Fault("flow", "create trajectories/", "after", "delay", random.randint(1, 3))
            kill_points = [KillPoint("engine", commit), *kill_points[:2]]
        yield Plan(number, settings, tuple(kill_points))


def torment(driver: RunDriver, plan: Plan) -> Result:
    """Run to the end through every kill point that comes, and look at what is left."""
    result, began = Result(plan), time.monotonic()
    driver.arm(*(point.store for point in plan.kill_points if point.store))
    engine = dict(point.engine for point in plan.kill_points if point.engine)
    driver.faults.write_text(json.dumps({**engine, "seconds_per_token": plan.seconds_per_token}))
    try:
        driver.start()
        while attend(driver, result) != 0:
            driver.start()
        judge(driver, result)
    except Hang as hang:
        result.hangs += 1
        result.faults.append(str(hang))
    except Exception:  # noqa: BLE001 - whatever it is, it is a finding about this run, and the others go on
        result.faults.append(traceback.format_exc())
    finally:
        driver.clean_up()
    result.seconds = time.monotonic() - began
    return result


def attend(driver: RunDriver, result: Result) -> int:
    """Follow one command to its end, note and do what is killed meanwhile; its exit status, which must be explained."""
    assert driver.process is not None
    deadline = time.monotonic() + HANG_SECONDS
    while (status := driver.process.poll()) is None:
        for point in reached(driver, result):
            deadline = time.monotonic() + HANG_SECONDS
            result.killed.append(point)
            if point.by_us and driver.find(point.victim):
                driver.kill(point.victim)
        if time.monotonic() > deadline:
            raise Hang(f"no end and no kill for {HANG_SECONDS:g} s: {driver.errors}{driver.log('trainer')}")
        time.sleep(0.05)
    result.killed += reached(driver, result)
    if status not in (0, -9) and not (status == 1 and "forebay: " in driver.errors) or "Traceback" in driver.errors:
        result.faults.append(f"status {status}: {driver.errors}")
    if orphans := driver.orphans():
        result.faults.append(f"status {status} left {orphans}")
    return status


def reached(driver: RunDriver, result: Result) -> list[KillPoint]:
    """Kill points whose fault has happened, and that are not noted yet."""
    armed, engine = driver.armed(), json.loads(driver.faults.read_text())
    waiting = [point for point in result.plan.kill_points if point not in result.killed]
    return [point for point in waiting if point.store not in armed and not (point.engine and point.engine[0] in engine)]


def judge(driver: RunDriver, result: Result) -> None:
    """Account for the run; a window of 0 must have come to the bits of the plain loop."""
    result.account = account(driver)
    assert_sound(driver)
    assert driver.orphans() == []
    if driver.config.grpo.async_grpo.max_trajectory_age_steps == 0 and driver.recipe["pool"].get("python"):
        steps = driver.config.grpo.max_num_steps
        expected = sequential.train(driver.config, driver.policy(), even_share, steps=steps)
        assert_same_bits(checkpoint_tensors(driver.store), expected)


def fake_runs(seed: int, wanted: int, directory: Path) -> list[Result]:
    """Torment runs with the model engine, some side by side, until so many kills have happened."""
    plans, results, lock = fake_plans(seed), [], threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if sum(len(result.killed) for result in results) >= wanted:
                    return
                plan = next(plans)
            driver = RunDriver(directory / f"fake-{plan.number}", directory / "policies", plan.settings)
            result = torment(driver, plan)
            with lock:
                results.append(result)
                report(f"fake run {plan.number}", result)

    with ThreadPoolExecutor(SIDE_BY_SIDE) as workers:
        for worker in [workers.submit(work) for _ in range(SIDE_BY_SIDE)]:
            worker.result()
    return results


def real_runs(seed: int, wanted: int, directory: Path) -> list[Result]:
    """Torment runs with vLLM, most of them with one engine that outlives them."""
    results: list[Result] = []
    plans = real_plans(seed)
    with ExitStack() as stack:
        url = None
        while sum(len(result.killed) for result in results) < wanted:
            plan = next(plans)
            driver = RunDriver(directory / f"real-{plan.number}", directory / "policies", plan.settings)
            if "pool" not in plan.settings:
                url = url or stack.enter_context(running_engine(driver, directory))
                driver.recipe["pool"] = {"kind": "external", "urls": [url]}
            results.append(torment(driver, plan))
            report(f"real run {plan.number}", results[-1])
    return results


def report(name: str, result: Result) -> None:
    """One line of progress, and everything about a run that is not sound."""
    variant = result.plan.settings["grpo"]["async_grpo"]
    print(
        f"{name}: window {variant['max_trajectory_age_steps']}, {len(result.killed)} kills, {result.seconds:.0f} s, "
        f"{'sound' if result.sound else 'NOT SOUND'}",
        flush=True,
    )
    if not result.sound:
        points = "; ".join(str(kill_point) for kill_point in result.killed)
        print("\n".join([f"  settings: {result.plan.settings}", f"  killed: {points}", *result.faults]), flush=True)


def table(results: list[Result]) -> str:
    """One row per victim, in which each run counts that lost this victim, and one of all runs."""
    header = (
        "killed",
        "kill points",
        "runs",
        "skipped",
        "trained twice",
        "tokens over the bound",
        "hangs",
        "other faults",
    )
    rows = [header]
    victims = sorted({point.victim for result in results for point in result.killed})
    for victim in [*victims, None]:
        hit = [r for r in results if victim is None or any(point.victim == victim for point in r.killed)]
        points = [point for result in hit for point in result.killed if victim in (None, point.victim)]
        figures = (
            len(points),
            len(hit),
            sum(result.account.skipped for result in hit),
            sum(result.account.repeated for result in hit),
            sum(result.account.stale_tokens for result in hit),
            sum(result.hangs for result in hit),
            sum(len(result.faults) for result in hit),
        )
        rows.append((victim or "all", *(str(figure) for figure in figures)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--fake", type=int, default=200, help="kill points with the model engine")
    parser.add_argument("--real", type=int, default=20, help="kill points with vLLM on the CPU")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="forebay-torture-") as name:
        results = fake_runs(arguments.seed, arguments.fake, Path(name))
        results += real_runs(arguments.seed, arguments.real, Path(name))
    print(table(results))
    sys.exit(0 if all(result.sound for result in results) else 1)


if __name__ == "__main__":
    main()
