"""Engines are started together or not at all, come and go while the run goes on, and are ended by one deadline."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flows import engines as module
from flows import probe, slots, wishes
from flows.control import LocalControl, Signals
from flows.engines import Engines, PoolFailed
from flows.slots import LOOKS_AWAY, LOOKS_TO_RETURN
from flows.supervise import Child
from flows.wishes import WishRefused, pool_wish
from grpo_core.config import ExternalPool, LocalPool, RunConfig
from grpo_core.rollout.launch import EngineCommand
from grpo_core.rollout.pool import Pool
from grpo_core.trajectory import Stamp
from storage.objects import ObjectStore
from storage.pool import PoolChange, PoolWish, RefitRecord, read_pool_changes, write_pool_wish, write_refit
from tests.fake_engine import FakeEngine, Fault, server_info

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(300)"
)


@pytest.fixture(autouse=True)
def _stubborn_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(*_: object) -> EngineCommand:
        return EngineCommand((sys.executable, "-c", STUBBORN), os.environ)

    monkeypatch.setattr(module, "engine_command", command)


def engines(tmp_path: Path, router: Pool | None = None, **pool: object) -> Engines:
    config = RunConfig(pool=LocalPool.model_validate(pool))
    control = LocalControl(Signals(), show=lambda progress: None, say=lambda message: None)
    return Engines(config, tmp_path, tmp_path, router or Pool(), control)


def children(of: Engines) -> list[Child]:
    return [slot.child for slot in of._slots if slot.child is not None]


def all_ready(of: Engines) -> None:
    deadline = time.monotonic() + 20
    while not all("ready" in child.tail() for child in children(of)):
        assert time.monotonic() < deadline, "the processes did not start"
        time.sleep(0.02)


def test_engines_started_before_one_that_cannot_be_are_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(module, "port_is_free", lambda host, port: port != 30001)
    pool = engines(tmp_path, engines=2, port=30000)
    with pytest.raises(PoolFailed, match="30001, the port is taken"):
        pool.__enter__()
    (child,) = children(pool)
    assert child.poll() is not None


def test_engines_that_ignore_sigterm_end_by_one_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines: list[float | None] = []
    stop = Child.stop
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(
        Child, "stop", lambda child, deadline=None: (deadlines.append(deadline), stop(child, deadline))[1]
    )
    with engines(tmp_path, engines=3) as pool:
        all_ready(pool)
    assert [child.poll() for child in children(pool)] == [-signal.SIGKILL] * 3
    assert len(deadlines) == 3 and len(set(deadlines)) == 1 and deadlines[0] is not None


def test_an_engine_that_cannot_be_stopped_keeps_none_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.0)
    pool = engines(tmp_path, engines=2)
    pool.start()
    stuck, other = children(pool)
    with monkeypatch.context() as patch:
        patch.setattr(other, "stop", lambda deadline: (_ for _ in ()).throw(RuntimeError("stuck")))
        with pytest.raises(RuntimeError, match="stuck"):
            pool.__exit__()
    assert stuck.poll() is not None
    other.stop()


@dataclass
class Stage:
    """A run's engines, its router and its store. `said` is what people were told."""

    engines: Engines
    router: Pool
    store: ObjectStore
    said: list[str]
    live: RefitRecord | None = None
    version: int = -1
    changes: list[PoolChange] = field(default_factory=list)

    def until(self, condition: Callable[[], bool]) -> None:
        """Rounds until something is so."""
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, f"it never came to that; said: {self.said}"
            self.round()
            time.sleep(0.01)

    def round(self) -> None:
        self.engines.watch(self.store, 1, self.live)
        self.changes += read_pool_changes(self.store, 1, after=len(self.changes) - 1)

    def joined(self) -> list[str]:
        return [name for change in self.changes for name in change.joined]

    def left(self) -> list[str]:
        return [name for change in self.changes for name in change.left]

    def admitted(self) -> set[str]:
        return {member.name for member in self.router.members() if member.admitted}

    def refit(self, *names: str, late: bool = False) -> None:
        """What the trainer and the pipeline do around a refit of these engines."""
        self.version += not late
        record = RefitRecord(1, self.version, self.version, names, {}, {})
        write_refit(self.store, record)
        if not late:
            self.live = record
            self.router.live(Stamp(1, self.version), names)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START_SECONDS", 0.0)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(wishes, "WISH_SECONDS", 0.0)
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(slots, "LONGEST_DELAY", 0.0)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    with ExitStack() as stack:

        def begin(pool: LocalPool | ExternalPool, **sections: Any) -> Stage:
            said: list[str] = []
            control = LocalControl(Signals(), show=lambda progress: None, say=said.append)
            router = Pool()
            config = RunConfig(pool=pool, **sections)
            made = stack.enter_context(Engines(config, tmp_path, tmp_path, router, control))
            made.begin_attempt()
            return Stage(made, router, ObjectStore.open(str(tmp_path / "run")), said)

        yield begin


@pytest.fixture
def fakes() -> Iterator[list[FakeEngine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(FakeEngine()) for _ in range(2)]


def external(fakes: list[FakeEngine], **settings: object) -> ExternalPool:
    return ExternalPool.model_validate({"kind": "external", "urls": [fake.url for fake in fakes], **settings})


def test_an_engine_joins_when_it_answers_and_serves_when_a_refit_names_it(
    stage: Callable[..., Stage], fakes: list[FakeEngine]
) -> None:
    made = stage(external(fakes))
    made.until(lambda: len(made.joined()) == 2)
    assert made.engines.all_ready()
    assert made.admitted() == set()
    made.refit("engine-0")
    made.round()
    assert made.admitted() == {"engine-0"}
    for fake in fakes:
        fake.version = "1.0"
    for _ in range(5):
        made.round()
    assert made.admitted() == {"engine-0"}, "what an engine says of itself is not enough"
    made.refit("engine-1", late=True)
    made.round()
    assert made.admitted() == {"engine-0", "engine-1"}


def test_records_of_engines_that_joined_late_are_read_once_and_per_version(
    stage: Callable[..., Stage], fakes: list[FakeEngine]
) -> None:
    made = stage(external(fakes))
    made.until(lambda: len(made.joined()) == 2)
    made.refit("engine-0")
    made.refit("engine-1", late=True)
    made.round()
    made.refit("engine-1")
    made.round()
    assert made.admitted() == {"engine-1"}
    made.refit("engine-0", "gone", late=True)
    made.round()
    assert made.admitted() == {"engine-0", "engine-1"}


def test_an_external_engine_that_was_restarted_joins_again_under_a_new_name(
    stage: Callable[..., Stage], fakes: list[FakeEngine]
) -> None:
    made = stage(external(fakes))
    made.until(lambda: len(made.joined()) == 2)
    made.refit("engine-0", "engine-1")
    fakes[0].version = fakes[1].version = "1.0"
    made.until(lambda: all(slot.stamp == "1.0" for slot in made.engines._slots))
    fakes[1].restart()
    made.until(lambda: "engine-1-1" in made.joined())
    assert made.left() == ["engine-1"]
    assert made.admitted() == {"engine-0"}
    assert any("was restarted and has lost its weights" in line for line in made.said)


def test_an_external_engine_that_falls_silent_leaves_until_it_answers_again(
    stage: Callable[..., Stage], fakes: list[FakeEngine]
) -> None:
    made = stage(external(fakes, health_timeout_seconds=0.3))
    made.until(lambda: len(made.joined()) == 2)
    made.refit("engine-0", "engine-1")
    silent = Fault("/health", "status", times=10**6, status=503)
    fakes[0].faults.append(silent)
    made.until(lambda: made.left() == ["engine-0"])
    assert made.admitted() == {"engine-1"}
    silent.times = 0
    answers = fakes[0].calls.count("/metrics")
    made.until(lambda: "engine-0-1" in made.joined())
    assert fakes[0].calls.count("/metrics") - answers >= LOOKS_TO_RETURN


def test_an_external_engine_that_broke_before_it_had_a_version_returns_only_after_a_real_absence(
    stage: Callable[..., Stage], fakes: list[FakeEngine]
) -> None:
    made = stage(external(fakes))
    made.until(lambda: len(made.joined()) == 2)
    made.engines.replace({"engine-1": "start: 500"})
    hiccup = Fault("/health", "status", times=1, status=503)
    fakes[1].faults.append(hiccup)
    made.until(lambda: hiccup.times == 0)
    looks = fakes[1].calls.count("/metrics")
    made.until(lambda: fakes[1].calls.count("/metrics") > looks + 3 * LOOKS_TO_RETURN)
    assert "engine-1-1" not in made.joined()
    fakes[1].faults.append(Fault("/health", "status", times=LOOKS_AWAY + 1, status=503))
    made.until(lambda: "engine-1-1" in made.joined())


def test_an_external_engine_that_a_refit_broke_is_refused_by_name_until_it_is_restarted(
    stage: Callable[..., Stage], fakes: list[FakeEngine]
) -> None:
    made = stage(external(fakes))
    made.until(lambda: len(made.joined()) == 2)
    made.refit("engine-0")
    fakes[1].version = "1.0"
    made.until(lambda: made.engines._slots[1].stamp == "1.0")
    made.engines.replace({"engine-1": "transfer: the link broke"})
    made.engines.replace({"engine-1": "transfer: the link broke"})
    assert sum("the link broke" in line and fakes[1].url in line for line in made.said) == 1
    looks = fakes[1].calls.count("/metrics")
    made.until(lambda: fakes[1].calls.count("/metrics") > looks + 3)
    assert "engine-1-1" not in made.joined()
    fakes[1].restart()
    made.until(lambda: "engine-1-1" in made.joined())
    with pytest.raises(PoolFailed, match="no other engine is left"):
        made.engines.replace({"engine-0": "finish: 500", "engine-1-1": "finish: 500"})


def test_silence_does_not_mend_an_external_engine_that_a_refit_broke(
    stage: Callable[..., Stage], fakes: list[FakeEngine]
) -> None:
    made = stage(external(fakes, health_timeout_seconds=0.1))
    made.until(lambda: len(made.joined()) == 2)
    fakes[1].version = "1.0"
    made.until(lambda: made.engines._slots[1].stamp == "1.0")
    made.engines.replace({"engine-1": "transfer: the link broke"})
    silent = Fault("/health", "status", times=10**6, status=503)
    fakes[1].faults.append(silent)
    gone = time.monotonic() + 0.3
    made.until(lambda: time.monotonic() > gone)
    silent.times = 0
    looks = fakes[1].calls.count("/metrics")
    made.until(lambda: fakes[1].calls.count("/metrics") > looks + 3 * LOOKS_TO_RETURN)
    assert "engine-1-1" not in made.joined()
    fakes[1].restart()
    made.until(lambda: "engine-1-1" in made.joined())


def test_an_external_engine_that_never_answers_keeps_nobody_waiting(
    stage: Callable[..., Stage], fakes: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EXTERNAL_SECONDS", 0.0)
    fakes[1].faults.append(Fault("/health", "status", times=10**6))
    made = stage(external(fakes, start_timeout_seconds=0.2))
    made.until(lambda: made.engines.all_ready())
    made.until(lambda: any("the run goes on without it" in line for line in made.said))
    fakes[1].faults.clear()
    made.until(lambda: len(made.joined()) == 2)


def test_a_pool_of_which_nobody_answers_fails_naming_the_engine(
    stage: Callable[..., Stage], fakes: list[FakeEngine]
) -> None:
    for fake in fakes:
        fake.die()
    made = stage(external(fakes, start_timeout_seconds=0.1))
    with pytest.raises(
        PoolFailed, match=r"engine-\d at http://\S+ was not ready within pool.start_timeout_seconds=0.1"
    ):
        made.until(lambda: False)


def test_engines_are_added_and_removed_while_the_run_goes_on(
    stage: Callable[..., Stage], fakes: list[FakeEngine]
) -> None:
    made = stage(external(fakes[:1]))
    made.until(lambda: made.joined() == ["engine-0"])
    made.refit("engine-0")
    write_pool_wish(made.store, pool_wish([fakes[1].url + "/"], []))
    made.until(lambda: made.joined() == ["engine-0", "engine-1"])
    made.refit("engine-1", late=True)
    write_pool_wish(made.store, PoolWish(remove=(fakes[0].url,)))
    made.until(lambda: made.left() == ["engine-0"])
    made.round()
    assert made.admitted() == {"engine-1"}
    write_pool_wish(made.store, PoolWish(add=(fakes[0].url,)))
    made.until(lambda: made.joined()[-1] == "engine-2")
    write_pool_wish(made.store, PoolWish(remove=tuple(fake.url for fake in fakes)))
    with pytest.raises(PoolFailed, match="was the last engine of the pool"):
        made.round()


def test_a_continued_run_does_not_wait_for_an_engine_that_was_removed(
    stage: Callable[..., Stage], fakes: list[FakeEngine]
) -> None:
    made = stage(external(fakes[:1]))
    write_pool_wish(made.store, PoolWish(add=(fakes[1].url,)))
    write_pool_wish(made.store, PoolWish(remove=(fakes[0].url,)))
    fakes[0].die()
    made.engines.heed_wishes(made.store)
    deadline = time.monotonic() + 20
    while not made.engines.all_ready():
        assert time.monotonic() < deadline
        made.engines.probe()
    made.until(lambda: made.joined() == ["engine-1"])


@pytest.mark.parametrize(
    ("add", "remove", "said"),
    [
        ([], [], "no engine is named"),
        (["http://a:1"], ["http://a:1/"], "http://a:1 cannot be added and removed at once"),
        (["a:1"], [], "'a:1' is not the address"),
        ([], ["http://a:1/v1"], "is not the address"),
    ],
)
def test_a_wish_that_cannot_be_meant_is_refused(add: list[str], remove: list[str], said: str) -> None:
    with pytest.raises(WishRefused, match=said):
        pool_wish(add, remove)


@pytest.mark.parametrize("stale_policy", ["drop", "wait"])
def test_a_request_that_is_too_old_to_be_trained_on_is_ended_once(
    stage: Callable[..., Stage], fakes: list[FakeEngine], stale_policy: str
) -> None:
    made = stage(external(fakes[:1]), grpo={"async_grpo": {"stale_policy": stale_policy}})
    made.until(lambda: made.joined() == ["engine-0"])
    made.refit("engine-0")
    fakes[0].calls.clear()

    async def run() -> None:
        async with made.router.engine(weight=1, deadline_seconds=0, request_id="r", since=Stamp(1, 0)):
            made.engines.cancel_overdue(0)
            for _ in range(3):
                made.engines.cancel_overdue(1)
            while "/abort_requests" not in fakes[0].calls:
                await asyncio.sleep(0.01)

    asyncio.run(run())
    aborted = [body for path, body in fakes[0].bodies if path == "/abort_requests"]
    assert aborted == [{"request_ids": ["generate-tokens-r"]}]


def test_a_request_whose_next_token_can_be_trained_is_not_ended(
    stage: Callable[..., Stage], fakes: list[FakeEngine]
) -> None:
    made = stage(external(fakes[:1]))
    made.until(lambda: made.joined() == ["engine-0"])
    made.refit("engine-0")

    async def run() -> None:
        async with made.router.engine(weight=1, deadline_seconds=0, request_id="r", since=Stamp(1, 0)):
            made.engines.cancel_overdue(9)

    asyncio.run(run())
    made.engines._prober._threads.shutdown()
    assert "/abort_requests" not in fakes[0].calls


def test_an_engine_that_hangs_is_told_once_and_keeps_no_other_from_being_told_or_looked_at(
    stage: Callable[..., Stage], fakes: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "MOST_LOOKS", 1)
    made = stage(external(fakes), grpo={"async_grpo": {"stale_policy": "drop"}})
    made.until(lambda: len(made.joined()) == 2)
    made.refit("engine-0", "engine-1")
    fakes[0].faults.append(Fault("/abort_requests", "hang", times=10**6))

    async def request(name: str) -> None:
        async with made.router.engine(weight=1, deadline_seconds=0, request_id=name, since=Stamp(1, 0)):
            await asyncio.Event().wait()

    async def run() -> None:
        requests = [asyncio.create_task(request(str(number))) for number in range(8)]
        while len(made.router.in_flight()) < len(requests):
            await asyncio.sleep(0.01)
        made.engines.cancel_overdue(1)
        requests += [asyncio.create_task(request(str(number))) for number in range(8, 16)]
        while len(made.router.in_flight()) < len(requests):
            await asyncio.sleep(0.01)
        looks = [fake.calls.count("/health") for fake in fakes]
        await asyncio.to_thread(
            made.until,
            lambda: all(fake.calls.count("/health") > seen + 3 for fake, seen in zip(fakes, looks, strict=True)),
        )
        while told(fakes[1]) != on(1):
            made.engines.cancel_overdue(1)
            await asyncio.sleep(0.01)
        for task in requests:
            task.cancel()

    def on(number: int) -> set[str]:
        return {request.request_id for request in made.router.in_flight() if request.engine == f"engine-{number}"}

    def told(fake: FakeEngine) -> set[str]:
        lists = [body["request_ids"] for path, body in fake.bodies if path == "/abort_requests"]
        return {name.removeprefix("generate-tokens-") for names in lists for name in names}

    asyncio.run(run())
    assert fakes[0].calls.count("/abort_requests") == 1, "one call at a time"
    assert fakes[1].calls.count("/abort_requests") <= 2, "one call for all that are overdue"


def test_an_engine_that_does_not_serve_is_told_nothing(stage: Callable[..., Stage], fakes: list[FakeEngine]) -> None:
    made = stage(external(fakes), grpo={"async_grpo": {"stale_policy": "drop"}})
    made.until(lambda: len(made.joined()) == 2)
    made.refit("engine-0")

    async def run() -> None:
        async with made.router.engine(weight=1, deadline_seconds=0, request_id="r", since=Stamp(1, 0)):
            made.engines.replace({"engine-0": "start: 500"})
            made.engines.cancel_overdue(1)

    asyncio.run(run())
    made.until(lambda: fakes[0].calls.count("/health") > 5)
    assert "/abort_requests" not in fakes[0].calls


def test_an_external_engine_with_raw_log_probs_joins_when_it_was_started_as_it_should_be(
    stage: Callable[..., Stage], fakes: list[FakeEngine]
) -> None:
    right, fakes[1].configuration = fakes[1].configuration, server_info(logprobs_mode="raw_logprobs")
    made = stage(external(fakes, start_timeout_seconds=0.1))
    made.until(lambda: made.joined() == ["engine-0"] and any("raw_logprobs" in line for line in made.said))
    assert made.engines.all_ready()
    asked = fakes[1].calls.count("/server_info")
    made.until(lambda: fakes[1].calls.count("/server_info") > asked + 3)
    assert made.joined() == ["engine-0"]
    (refusal,) = [line for line in made.said if fakes[1].url in line]
    assert "start it with processed_logprobs; it gets no request until then" in refusal
    fakes[1].configuration = right
    made.until(lambda: made.joined() == ["engine-0", "engine-1"])


def test_a_pool_of_which_no_engine_was_started_as_it_should_be_fails(
    stage: Callable[..., Stage], fakes: list[FakeEngine]
) -> None:
    for fake in fakes:
        fake.configuration = server_info(dtype="float32")
    made = stage(external(fakes))
    with pytest.raises(
        PoolFailed, match=r"computes in torch\.float32; start it with --dtype bfloat16.*no other engine"
    ):
        made.until(lambda: False)


def test_an_engine_that_fails_to_say_how_it_was_started_is_asked_again(
    stage: Callable[..., Stage], fakes: list[FakeEngine]
) -> None:
    fakes[0].faults.append(Fault("/server_info", "reset", times=3))
    made = stage(external(fakes[:1]))
    made.until(lambda: made.joined() == ["engine-0"])


@pytest.mark.parametrize(("stamp", "foreign"), [("default", False), ("0.7", False), ("1.7", True), ("theirs", True)])
def test_an_external_engine_that_another_run_may_use_is_warned_about(
    stage: Callable[..., Stage], fakes: list[FakeEngine], stamp: str, foreign: bool
) -> None:
    fakes[0].version = stamp
    made = stage(external(fakes[:1], health_timeout_seconds=0.2))
    made.until(lambda: made.joined() == ["engine-0"])
    assert any(f"carries weights {stamp} of another run" in line for line in made.said) is foreign
    fakes[0].version = "1.8"
    silent = Fault("/health", "status", times=10**6, status=503)
    fakes[0].faults.append(silent)
    made.until(lambda: made.left() == ["engine-0"])
    said, silent.times = len(made.said), 0
    made.until(lambda: "engine-0-1" in made.joined())
    assert not any("of another run" in line for line in made.said[said:]), "by then it carries ours"


def test_engines_on_a_network_are_warned_about_whoever_started_them(stage: Callable[..., Stage]) -> None:
    made = stage(ExternalPool.model_validate({"kind": "external", "urls": ["http://127.0.0.1:9", "http://10.0.0.7:9"]}))
    (warning,) = made.said
    assert warning.startswith("warning: http://10.0.0.7:9: an engine's control routes have no authentication")


def test_load_of_the_engines_becomes_metrics_and_evictions_become_a_limit(
    stage: Callable[..., Stage], fakes: list[FakeEngine]
) -> None:
    made = stage(external(fakes))
    made.until(lambda: len(made.joined()) == 2)
    made.refit("engine-0", "engine-1")
    made.until(lambda: all(slot.load_before for slot in made.engines._slots))
    metrics = made.engines.metrics()
    assert (metrics["pool/engines"], metrics["pool/queued"], metrics["pool/kv_usage"]) == (2, 0, 0.25)
    assert {member.limit for member in made.router.members()} == {None}
    fakes[0].preemptions, fakes[0].kv_usage = 3, 0.9
    made.until(lambda: made.router.members()[0].limit is not None)
    assert made.router.members()[1].limit is None


def local(**settings: object) -> LocalPool:
    return LocalPool.model_validate({"engines": 1, **settings})


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Local processes that answer, unless told otherwise; what they are asked goes nowhere."""
    answers = {"healthy": True}
    monkeypatch.setattr(probe, "responds", lambda url: answers["healthy"])
    monkeypatch.setattr(probe, "text_of", lambda url: None)
    return answers


def test_a_local_engine_that_died_is_started_again_under_a_new_name(
    stage: Callable[..., Stage], healthy: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stage(local(max_restarts=2))
    made.until(lambda: made.joined() == ["engine-0"])
    for life in (1, 2):
        os.kill(children(made.engines)[0].pid, signal.SIGKILL)
        made.until(lambda: made.joined()[-1] == f"engine-0-{life}")  # noqa: B023
    assert made.left() == ["engine-0", "engine-0-1"]
    os.kill(children(made.engines)[0].pid, signal.SIGKILL)
    with pytest.raises(
        PoolFailed, match=r"(?s)no engine is left: engine 0 was lost 3 times, more than pool.max_restarts=2.*SIGKILL"
    ):
        made.until(lambda: False)


def test_the_run_goes_on_without_an_engine_whose_budget_is_spent(
    stage: Callable[..., Stage], healthy: dict[str, bool]
) -> None:
    made = stage(local(engines=2, max_restarts=0))
    made.until(lambda: len(made.joined()) == 2)
    first, second = children(made.engines)
    os.kill(first.pid, signal.SIGKILL)
    made.until(lambda: made.left() == ["engine-0"])
    assert any("The run goes on without it" in line and "SIGKILL" in line for line in made.said)
    for _ in range(5):
        made.round()
    assert children(made.engines) == [second] and made.engines.all_ready()
    os.kill(second.pid, signal.SIGKILL)
    with pytest.raises(PoolFailed, match=r"(?s)no engine is left: engine 1 was lost 1 times.*SIGKILL"):
        made.until(lambda: False)


def test_an_engine_that_hangs_while_it_starts_is_killed_and_started_again_within_its_budget(
    stage: Callable[..., Stage], healthy: dict[str, bool]
) -> None:
    made = stage(local(start_timeout_seconds=0.2, max_restarts=1))
    made.until(lambda: made.joined() == ["engine-0"])
    os.kill(children(made.engines)[0].pid, signal.SIGKILL)
    healthy["healthy"] = False
    made.until(lambda: made.left() == ["engine-0"] and bool(children(made.engines)))
    (hung,) = children(made.engines)
    with pytest.raises(PoolFailed, match=r"(?s)engine-0-1 at \S+ was not ready within pool.start_timeout_seconds=0.2"):
        made.until(lambda: False)
    assert hung.poll() is not None


def test_a_first_start_that_hangs_is_tried_again_and_its_last_lines_are_shown(
    stage: Callable[..., Stage], healthy: dict[str, bool]
) -> None:
    healthy["healthy"] = False
    made = stage(local(start_timeout_seconds=2.0))
    all_ready(made.engines)
    made.until(lambda: any("was not ready within" in line for line in made.said))
    assert "its last lines are:\nready\nIt is started again" in made.said[-1]
    healthy["healthy"] = True
    made.until(lambda: made.joined() == ["engine-0-1"])


def test_a_local_engine_waits_before_it_is_started_again(
    stage: Callable[..., Stage], healthy: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "LONGEST_DELAY", 1e9)
    monkeypatch.setattr(module, "restart_delay", lambda losses: 1e9)
    made = stage(local())
    made.until(lambda: made.joined() == ["engine-0"])
    os.kill(children(made.engines)[0].pid, signal.SIGKILL)
    made.until(lambda: made.left() == ["engine-0"])
    for _ in range(5):
        made.round()
    assert children(made.engines) == []
    made.engines._slots[0].restart_at = 0.0
    made.until(lambda: made.joined()[-1] == "engine-0-1")


def test_a_local_engine_that_falls_silent_is_killed_and_replaced(
    stage: Callable[..., Stage], healthy: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stage(local(health_timeout_seconds=0.2))
    made.until(lambda: made.joined() == ["engine-0"])
    (hung,) = children(made.engines)
    healthy["healthy"] = False
    made.until(lambda: made.left() == ["engine-0"])
    healthy["healthy"] = True
    made.until(lambda: made.joined()[-1] == "engine-0-1")
    assert hung.poll() is not None
    assert any("was silent for pool.health_timeout_seconds=0.2" in line for line in made.said)


def test_a_local_engine_that_a_refit_broke_is_replaced(
    stage: Callable[..., Stage], healthy: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stage(local())
    made.until(lambda: made.joined() == ["engine-0"])
    made.engines.replace({"engine-0": "transfer: 500"})
    assert made.router.members() == []
    made.until(lambda: made.joined()[-1] == "engine-0-1")
    assert any("broke in a refit: transfer: 500" in line for line in made.said)


def test_a_port_that_somebody_else_took_before_a_restart_is_a_loss_and_another_is_tried(
    stage: Callable[..., Stage], healthy: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stage(local())
    made.until(lambda: made.joined() == ["engine-0"])
    taken = iter([False])
    monkeypatch.setattr(module, "port_is_free", lambda host, port: next(taken, True))
    os.kill(children(made.engines)[0].pid, signal.SIGKILL)
    made.until(lambda: made.joined()[-1] == "engine-0-2")
    assert any("the port is taken" in line and "It is started again" in line for line in made.said)


def test_an_engine_whose_port_was_taken_while_it_started_is_started_again(
    stage: Callable[..., Stage], healthy: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy["healthy"] = False
    with monkeypatch.context() as patch:
        loser = "raise SystemExit('OSError: [Errno 98] Address already in use')"
        patch.setattr(module, "engine_command", lambda *_: EngineCommand((sys.executable, "-c", loser), os.environ))
        made = stage(local())
    made.until(lambda: any("in use\nIt is started again" in line for line in made.said))
    healthy["healthy"] = True
    made.until(lambda: made.joined() == ["engine-0-1"])


def test_no_two_engines_are_given_one_port(stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch) -> None:
    ports = iter([30001, 30001, 30001, 30002])
    monkeypatch.setattr(module, "free_port", lambda host: next(ports))
    monkeypatch.setattr(module, "port_is_free", lambda host, port: True)
    made = stage(local(engines=2))
    assert [slot.url for slot in made.engines._slots] == ["http://127.0.0.1:30001", "http://127.0.0.1:30002"]


def test_an_engine_that_dies_while_it_starts_fails_the_run_at_once(
    stage: Callable[..., Stage], healthy: dict[str, bool]
) -> None:
    healthy["healthy"] = False
    made = stage(local())
    os.kill(children(made.engines)[0].pid, signal.SIGKILL)
    with pytest.raises(PoolFailed, match="died while it was starting"):
        made.until(lambda: False)


@pytest.mark.parametrize(("key", "others"), [(None, True), ("secret", False)])
def test_a_pool_that_others_can_reach_is_warned_about(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, key: str | None, others: bool
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("VLLM_API_KEY", key)
    made = stage(local(host="0.0.0.0"))
    (warning,) = made.said
    assert "no authentication" in warning
    assert ("VLLM_API_KEY is not set" in warning) is others
