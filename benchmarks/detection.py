"""How long it takes until a fault of an engine is known, beside the deadline by which it has to be.

    python -m benchmarks.detection

The engine is the scriptable one of the tests, so that a fault happens at a known moment: seconds count from there to
the error that names it, or to the record by which the trainer learns that the engine has left the pool. Deadlines are
short here, so that the faults that only a deadline ends do not take minutes. Status 1 if any of them was exceeded.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import aiohttp
import torch

from flows import engines as flow_engines
from flows.control import LocalControl, Signals
from flows.engines import Engines
from flows.probe import ANSWER_SECONDS
from grpo_core.config import ExternalPool, LocalPool, RunConfig, SamplingConfig
from grpo_core.refit.canary import Canary
from grpo_core.refit.control import EngineAddress, EngineControl
from grpo_core.refit.coordinator import RefitSettings, refit_weights
from grpo_core.refit.phases import GRACE_SECONDS
from grpo_core.refit.transfer import Weights
from grpo_core.rollout.engine import EngineClient, EngineRejected, EngineUnavailable
from grpo_core.rollout.launch import EngineCommand
from grpo_core.rollout.pool import Pool
from grpo_core.rollout.wire import InvalidGeneration
from grpo_core.trajectory import Stamp
from storage.objects import ObjectStore
from storage.pool import read_pool_changes
from tests.fake_engine import GENERATE, FakeEngine, Fault
from tests.turns import one_turn

RESULTS = Path("benchmarks/results")
# The deadlines of this benchmark, in seconds.
REQUEST, PHASE, HEALTH, START = 1.0, 1.0, 3.0, 3.0
# A look at an engine is three calls with a deadline each.
LOOK = flow_engines.LOOK_SECONDS + 3 * ANSWER_SECONDS
# Whoever waits for a thread, a process or a socket is woken this much later on a busy machine.
WAKING = 0.5
WEIGHTS = [("model.embed_tokens.weight", torch.ones(4, 2)), ("lm_head.weight", torch.ones(4, 2))]
SETTINGS = RefitSettings(
    connect_seconds=PHASE,
    pause_seconds=PHASE,
    start_seconds=PHASE,
    transfer_seconds=PHASE,
    finish_seconds=PHASE,
    resume_seconds=PHASE,
    canary_seconds=PHASE,
    pause_mode="keep",
    clear_cache=True,
    digests=False,
)


@dataclass(frozen=True, slots=True)
class Detection:
    """`seconds` from a fault until it was known as `known`, and the deadline for that."""

    fault: str
    known: str
    seconds: float
    deadline: float

    @property
    def row(self) -> dict[str, float | str]:
        """In the form of the other benchmarks."""
        return {"case": f"known: {self.fault}", "ours": self.seconds, "theirs": self.deadline, "unit": "s of deadline"}


REQUEST_FAULTS = {
    "delay": Fault(GENERATE, "delay", seconds=60),
    "silence": Fault(GENERATE, "hang"),
    "4xx": Fault(GENERATE, "status", status=400),
    "5xx": Fault(GENERATE, "status", status=503),
    "reset": Fault(GENERATE, "reset"),
    "null log-prob": Fault(GENERATE, "null_logprob"),
    "NaN log-prob": Fault(GENERATE, "nan_logprob"),
    "NaN log-prob as vLLM says it": Fault(GENERATE, "clamped_logprob"),
    "wrong version": Fault(GENERATE, "wrong_version", version="default"),
    "missing version": Fault(GENERATE, "missing_span"),
    "no token": Fault(GENERATE, "empty"),
    "nonsense": Fault(GENERATE, "garbage", text="{"),
    "death before the answer": Fault(GENERATE, "die"),
    "death in mid-request": Fault(GENERATE, "die", seconds=0.3),
}


def request_detections() -> Iterator[Detection]:
    """What a single request tells."""
    for name, fault in REQUEST_FAULTS.items():
        with FakeEngine(version="1.0", seconds_per_token=0.02) as engine:
            engine.faults.append(replace(fault))
            seconds, error = asyncio.run(failed_request(engine, tokens=40 if fault.kind == "die" else 4))
            began = fault.seconds if fault.kind == "die" else 0.0
            yield Detection(f"request: {name}", type(error).__name__, seconds - began, REQUEST + WAKING)
    with FakeEngine(version="1.0") as engine:
        engine.restart()
        seconds, error = asyncio.run(failed_request(engine, tokens=4))
        yield Detection("request: stale version after a restart", type(error).__name__, seconds, REQUEST + WAKING)


async def failed_request(engine: FakeEngine, *, tokens: int) -> tuple[float, Exception]:
    """Seconds until a request failed, and how."""
    async with aiohttp.ClientSession() as session:
        client = EngineClient(engine.url, session=session, name="e0")
        began = time.monotonic()
        try:
            await one_turn(
                client,
                [1, 2, 3],
                request_id="r",
                sampling=SamplingConfig(),
                max_tokens=tokens,
                seed=1,
                stop_token_ids=[],
                cache_salt="1.0",
                deadline_seconds=REQUEST,
            )
        except (EngineRejected, EngineUnavailable, InvalidGeneration) as error:
            return time.monotonic() - began, error
    raise AssertionError(f"the fault of {engine.url} was not noticed")


class HttpTransfer:
    """A transfer whose weights are the update call itself."""

    concurrent = True

    def prepare(self, weights: Weights, stamp: Stamp) -> int:
        return weights.bytes

    def is_open(self, engine: str) -> bool:
        return False

    def open(self, engine: EngineControl, deadline_seconds: float) -> None:
        engine.init_transfer({}, deadline_seconds)

    def send(self, engine: EngineControl, weights: Weights, deadline_seconds: float) -> None:
        engine.update({}, deadline_seconds)

    def close(self, engine: str) -> None:
        return None


PHASES = {
    "/init_weight_transfer_engine": "connect",
    "/pause": "pause",
    "/start_weight_update": "start",
    "/update_weights": "transfer",
    "/finish_weight_update": "finish",
    GENERATE: "canary",
}


def refit_detections() -> Iterator[Detection]:
    """What a refit of two engines tells when one of them fails a phase of it, which the other survives."""
    for path, phase in PHASES.items():
        for name, kind in {"death": "die", "silence": "hang", "5xx": "status"}.items():
            # After a failed canary the engine is told to stop, and finishing takes two calls.
            calls = 2 if phase in ("finish", "canary") else 1
            fault = Fault(path, kind)  # type: ignore[arg-type]
            yield refit_detection(f"refit: {name} in {phase}", fault, deadline=calls * PHASE + GRACE_SECONDS)
    yield refit_detection("refit: other weights than the trainer's", None, deadline=2 * PHASE + GRACE_SECONDS)


def refit_detection(name: str, fault: Fault | None, *, deadline: float) -> Detection:
    """A refit of which the second engine suffers the fault, or computes with other weights."""
    with ExitStack() as stack:
        engines = [stack.enter_context(FakeEngine()) for _ in range(2)]
        if fault is None:
            engines[1].score = lambda ids: [-1.0] * (len(ids) - 1)
        else:
            engines[1].faults.append(fault)
        uniform = -math.log(engines[0].vocabulary_size)
        began = time.monotonic()
        result = refit_weights(
            WEIGHTS,
            [EngineAddress(f"e{number}", engine.url) for number, engine in enumerate(engines)],
            Stamp(1, 1),
            HttpTransfer(),
            SETTINGS,
            canary=Canary((1, 2, 3), (uniform, uniform), tolerance=1e-4),
        )
        seconds = time.monotonic() - began
    assert result.refitted == ("e0",), f"{name}: {result}"
    (broken,) = result.broken
    return Detection(name, f"broken in {broken.phase}", seconds, deadline + WAKING)


def pool_detections() -> Iterator[Detection]:
    """What looking after the pool tells, until the trainer can read that the engine has left."""
    ejected = HEALTH + LOOK
    yield external_detection("pool: an engine answers 503", fails, ejected)
    yield external_detection("pool: an engine is silent", hangs, ejected)
    yield external_detection("pool: an engine is gone", FakeEngine.die, ejected)
    yield external_detection("pool: an engine was restarted and lost its weights", FakeEngine.restart, LOOK)
    yield local_detection("pool: a process was killed", starts=True, deadline=LOOK)
    yield local_detection("pool: a process hangs while it starts", starts=False, deadline=START + LOOK)


def fails(engine: FakeEngine) -> None:
    engine.faults.append(Fault("/health", "status", times=10**6, status=503))


def hangs(engine: FakeEngine) -> None:
    engine.faults.append(Fault("/health", "hang", times=10**6))


def external_detection(name: str, break_: Callable[[FakeEngine], None], deadline: float) -> Detection:
    """One of two external engines breaks while it serves."""
    with ExitStack() as stack:
        fakes = [stack.enter_context(FakeEngine()) for _ in range(2)]
        pool = ExternalPool(urls=tuple(fake.url for fake in fakes), health_timeout_seconds=HEALTH)
        watch = stack.enter_context(watched(pool, []))
        watch(lambda joined, left: len(joined) == 2)
        for fake in fakes:
            fake.version = "1.0"
        looks = fakes[1].calls.count("/weight_info")
        watch(lambda joined, left: fakes[1].calls.count("/weight_info") > looks + 1)
        break_(fakes[1])
        seconds = watch(lambda joined, left: left == {"engine-1"})
    return Detection(name, "left the pool", seconds, deadline + WAKING)


def local_detection(name: str, *, starts: bool, deadline: float) -> Detection:
    """A local engine is killed, or never gets ready; it is a process that sleeps, and answers if it `starts`."""
    command = EngineCommand((sys.executable, "-c", "import time; time.sleep(600)"), os.environ)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(flow_engines, "engine_command", lambda *_: command))
        stack.enter_context(mock.patch("flows.probe.responds", lambda url: starts))
        said: list[str] = []
        watch = stack.enter_context(watched(LocalPool(start_timeout_seconds=START), said))
        if starts:
            watch(lambda joined, left: len(joined) == 1)
            (child,) = (slot.child for slot in watch.engines._slots)
            assert child is not None
            os.kill(child.pid, signal.SIGKILL)
        seconds = watch(lambda joined, left: any("is started again" in line for line in said))
    return Detection(name, "is started again", seconds, deadline + WAKING)


class Watch:
    """Rounds of looking after the engines of a pool, as the flow makes them."""

    def __init__(self, engines: Engines, store: ObjectStore) -> None:
        self.engines = engines
        self._store = store

    def __call__(self, condition: Callable[[set[str], set[str]], bool]) -> float:
        """Seconds until something is so of the engines that joined, and of those that left."""
        began = time.monotonic()
        while True:
            self.engines.watch(self._store, 1, None)
            changes = read_pool_changes(self._store, 1, after=-1)
            joined = {name for change in changes for name in change.joined}
            left = {name for change in changes for name in change.left}
            if condition(joined, left):
                return time.monotonic() - began
            assert time.monotonic() - began < 10 * LOOK, "it was never noticed"
            time.sleep(self._store.poll_seconds)


@contextmanager
def watched(pool: LocalPool | ExternalPool, said: list[str]) -> Iterator[Watch]:
    """The engines of a pool under a store of their own. What people are told goes to `said`."""
    with tempfile.TemporaryDirectory() as directory:
        control = LocalControl(Signals(), show=lambda progress: None, say=said.append)
        with Engines(RunConfig(pool=pool), Path(directory), Path(directory), Pool(), control) as engines:
            engines.begin_attempt()
            yield Watch(engines, ObjectStore.open(f"{directory}/run"))


def detections() -> Iterable[Detection]:
    """All faults, one after the other."""
    yield from request_detections()
    yield from refit_detections()
    yield from pool_detections()


def measure() -> list[dict[str, float | str]]:
    """Seconds beside deadlines."""
    return [detection.row for detection in detections()]


def main() -> None:
    """Print the table as it grows."""
    rows, late = [], 0
    print(f"{'fault':52} {'known as':20} {'seconds':>8} {'deadline':>9}")
    for found in detections():
        late += found.seconds > found.deadline
        print(f"{found.fault:52} {found.known:20} {found.seconds:>8.2f} {found.deadline:>9.1f}", flush=True)
        rows.append(found.row)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "detection.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(f"{late} of {len(rows)} exceeded their deadline")
    sys.exit(1 if late else 0)


if __name__ == "__main__":
    main()
