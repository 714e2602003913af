"""The pool's engines as the flow sees them: started, watched, replaced, and announced to the trainer.

Invariants: an engine process has a name that is never used again; the trainer learns of every join and leave from
numbered records; an engine gets requests only once a refit record of the newest live version names it, which is after
the canary. A local engine that dies, falls silent, does not start in time or breaks in a refit is replaced, later each
time, within its budget; beyond it the pool goes on without it. An external one joins only if it was started as the run
needs it (`flows.examination`), whenever that may be. It leaves the pool and comes back, under a new name, when it has
answered for a while, longer each time, and one that broke in a refit only when it was restarted. The run fails when no
engine is left that could serve, with the last lines of the last one.
"""

import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from flows.aborts import Aborts
from flows.control import Control
from flows.examination import fault_of
from flows.probe import Look, Prober, examine
from flows.slots import Slot, engine_spec, restart_delay
from flows.supervise import Child, Command
from flows.wishes import Wishes
from grpo_core.config import LOOPBACK, ExternalPool, LocalPool, RunConfig
from grpo_core.ports import free_port, port_is_free
from grpo_core.rollout.launch import engine_command
from grpo_core.rollout.load import next_limit, pool_metrics
from grpo_core.rollout.pool import Pool, is_overdue
from grpo_core.rollout.wire import API_KEY_VARIABLE
from storage.objects import ObjectStore
from storage.pool import PoolChange, RefitRecord, read_refit, write_pool_change

# Between two looks at an engine that is starting, and at one that serves.
START_SECONDS, LOOK_SECONDS = 0.5, 2.0
# External engines run already: the trainer's start waits so long for one that does not answer, if another does.
EXTERNAL_SECONDS = 30.0
# Of all engines together: with the trainer's own before it, the whole run is gone within fifteen seconds.
GRACE_SECONDS = 3.0
# What an engine dies of whose port somebody else took while it was starting.
LOST_RACE = "address already in use"


class PoolFailed(RuntimeError):
    """The pool cannot serve; the message names the engine and shows its last lines."""


class PortTaken(PoolFailed):
    """Somebody else listens where an engine was to."""


class Engines:
    """Every engine of the pool. Use as a context: leaving it stops the local ones."""

    def __init__(self, config: RunConfig, policy_directory: Path, logs: Path, router: Pool, control: Control) -> None:
        self._config = config
        self._policy = policy_directory
        self._logs = logs
        self._router = router
        self._control = control
        self._prober = Prober()
        self._slots: list[Slot] = []
        self._numbers = 0
        self._wishes = Wishes()
        self._changes = 0
        self._late: tuple[str, int] = ("", 1)
        self._announced: set[str] = set()
        self._aborts = Aborts()

    def start(self) -> None:
        """Start the local engines, or take the external ones as they are. Does not wait for them."""
        pool = self._config.pool
        if isinstance(pool, ExternalPool):
            for url in pool.urls:
                self._add_external(url)
            return
        if pool.host not in LOOPBACK:
            self._warn_of_network(f"pool.host={pool.host}")
        for number in range(pool.engines):
            port = pool.port + number if pool.port else self._free_port(pool.host)
            slot = Slot(number, f"http://{pool.host}:{port}", f"engine-{number}", local=True)
            self._slots.append(slot)
            self._launch(slot, pool, port)
        self._numbers = pool.engines

    def _warn_of_network(self, what: str) -> None:
        key = "" if os.environ.get(API_KEY_VARIABLE) else f", and so are the others while {API_KEY_VARIABLE} is not set"
        self._control.warn(
            f"{what}: an engine's control routes have no authentication and are open to that network{key}"
        )

    def _free_port(self, host: str) -> int:
        """A free port that no other engine has been given, for they listen only after a while."""
        given = {urlsplit(slot.url).port for slot in self._slots}
        while (port := free_port(host)) in given:
            pass
        return port

    def _add_external(self, url: str) -> None:
        if urlsplit(url).hostname not in LOOPBACK:
            self._warn_of_network(url)
        name = f"engine-{self._numbers}"
        self._slots.append(Slot(self._numbers, url.rstrip("/"), name, started_at=time.monotonic()))
        self._numbers += 1

    def _launch(self, slot: Slot, pool: LocalPool, port: int) -> None:
        if not port_is_free(pool.host, port):
            raise PortTaken(
                f"{slot.name} cannot listen on {pool.host}:{port}, the port is taken; free it or set pool.port=0 for free ports"
            )
        spec = engine_spec(self._config, pool, self._policy, slot.number, port)
        command = engine_command(spec, os.environ, str(pool.python or sys.executable))
        slot.child = Child(
            Command(
                slot.name,
                command.arguments,
                command.environment,
                self._logs / f"{slot.name}.log",
                grace_seconds=GRACE_SECONDS,
            )
        )
        slot.started_at = time.monotonic()
        self._control.watch(slot.name, slot.child.poll)

    def begin_attempt(self) -> None:
        """Membership records are per attempt: a new one announces every ready engine again."""
        self._changes = 0
        self._late = ("", 1)
        self._announced.clear()

    def watch(self, store: ObjectStore, attempt: int, live: RefitRecord | None) -> None:
        """One round: note who became ready, who died, what was wished for, and who carries the newest version by now.
        Raise PoolFailed."""
        if self._wishes.are_due():
            self.heed_wishes(store)
        left = self.probe()
        new = [slot for slot in self._slots if slot.serves and slot.name not in self._announced]
        joined = {slot.name: slot.url for slot in new}
        for slot in new:
            self._router.join(slot.name, slot.url)
            if slot.is_of_another_run(attempt):
                self._control.warn(
                    f"{slot.name} at {slot.url} carries weights {slot.stamp} of another run; if that run still uses it, "
                    "neither can tell whose weights sampled a token: give each run engines of its own"
                )
        left = [name for name in left if name in self._announced]
        if joined or left:
            write_pool_change(store, attempt, self._changes, PoolChange(joined, tuple(left)))
            self._changes += 1
            self._announced = (self._announced | joined.keys()) - set(left)
        if live is not None:
            self._admit_late(store, live)

    def heed_wishes(self, store: ObjectStore) -> None:
        """Let engines in and out as people asked since the last time, or ever. `watch` does it too."""
        for url, wanted in self._wishes.new(store).items():
            here = next((slot for slot in self._slots if slot.url == url), None)
            if here is not None:
                here.unwanted = not wanted
            elif wanted:
                self._add_external(url)

    def probe(self) -> list[str]:
        """Look after the engines alone; the names of those that are gone. Raise PoolFailed."""
        now, left = time.monotonic(), list[str]()
        for slot in list(self._slots):
            if slot.unwanted:
                self._let_go(slot, left)
                continue
            if slot.local:
                self._check_process(slot, now, left)
            if slot.child is not None or not slot.local:
                answer = self._ask(slot)
                if answer is not None:
                    self._hear(slot, answer, now, left)
                self._check_silence(slot, now, left)
        return left

    def _ask(self, slot: Slot) -> Look | None:
        if slot.ready:
            return self._prober.ask(slot.name, slot.url, LOOK_SECONDS)
        look = None if slot.local else partial(examine, fault_of=partial(fault_of, config=self._config))
        return self._prober.ask(slot.name, slot.url, START_SECONDS, look)

    def replace(self, broken: Mapping[str, str]) -> None:
        """Take engines that a refit broke (name → how) out of the pool; the next round starts others.
        Raise PoolFailed."""
        for slot in self._slots:
            if slot.name not in broken or slot.broken is not None:
                continue
            slot.broken = broken[slot.name]
            self._router.leave(slot.name)
            if slot.child is not None:
                slot.child.stop()
                continue
            refusal = (
                f"external engine {slot.url} failed a refit ({slot.broken}) and holds unknown weights; "
                "it gets no request until it has been restarted"
            )
            if not any(other.may_serve for other in self._slots):
                raise PoolFailed(f"{refusal}, and no other engine is left; restart it and run the same command again")
            self._control.warn(refusal)

    def cancel_overdue(self, oldest: int) -> None:
        """End the requests of which nothing can be trained any more, now that no step admits versions before `oldest`.
        The engines have better things to do."""
        masked = self._config.grpo.async_grpo.stale_policy == "mask"
        adapters = self._config.refit.adapter_only
        overdue = {
            request.request_id: request
            for request in self._router.in_flight()
            if is_overdue(request, oldest, masked=masked, adapters=adapters)
        }
        self._aborts.end(overdue, {slot.name for slot in self._slots if slot.serves})

    def metrics(self) -> dict[str, float]:
        """The pool's numbers for the run's metrics, from the last look at each engine."""
        looks = [(slot.load, slot.load_before) for slot in self._slots if slot.load and slot.load_before]
        serving = sum(member.admitted for member in self._router.members())
        return {"pool/engines": float(serving), "pool/queued": float(self._router.waiting())} | pool_metrics(looks)

    def all_ready(self) -> bool:
        """Whether every engine answered, but for those that failed to start once and external ones that are slow."""
        if not any(slot.ready for slot in self._slots):
            return False
        patience = time.monotonic() - EXTERNAL_SECONDS
        return all(
            slot.ready or slot.lives > 0 or slot.refused is not None or (not slot.local and slot.started_at < patience)
            for slot in self._slots
        )

    def _check_process(self, slot: Slot, now: float, left: list[str]) -> None:
        """Note the end of a local engine's process, and start the next one when its time has come."""
        pool = self._config.pool
        assert isinstance(pool, LocalPool)
        if slot.child is None:
            if now >= slot.restart_at:
                # What it left behind may hold its port for a while.
                port = self._free_port(pool.host)
                slot.url = f"http://{pool.host}:{port}"
                try:
                    self._launch(slot, pool, port)
                except PortTaken as race:
                    self._lost(slot, str(race), now, left)
            return
        if slot.child.poll() is None:
            return
        failure = f"{slot.name} broke in a refit: {slot.broken}" if slot.broken else str(slot.child.failure())
        slot.child.stop()
        if not slot.ready and slot.lives == 0 and LOST_RACE not in failure.lower():
            raise PoolFailed(f"the engine died while it was starting: {failure}")
        self._lost(slot, failure, now, left)

    def _lost(self, slot: Slot, failure: str, now: float, left: list[str]) -> None:
        """Make room for the next process of a local engine, or go on without it when its budget is spent."""
        pool = self._config.pool
        assert isinstance(pool, LocalPool)
        losses = slot.losses_by(now) + 1
        self._leave(slot, left)
        if losses <= pool.max_restarts:
            delay = restart_delay(losses)
            self._control.warn(f"{failure}\nIt is started again in {delay:g} s.")
            slot.renew(slot.url, losses=losses, restart_at=now + delay)
            return
        spent = f"engine {slot.number} was lost {losses} times, more than pool.max_restarts={pool.max_restarts} allows: {failure}"
        self._slots.remove(slot)
        slot.child = None
        if not any(other.may_serve for other in self._slots):
            raise PoolFailed(f"no engine is left: {spent}")
        self._control.warn(f"{spent}\nThe run goes on without it.")

    def _hear(self, slot: Slot, answer: Look, now: float, left: list[str]) -> None:
        """Take in what an engine said."""
        if not answer.healthy:
            slot.miss()
            return
        if answer.fault is not None:
            self._refuse(slot, answer.fault)
            return
        if slot.was_restarted(answer.stamp):
            if not slot.local:
                self._control.warn(f"{slot.name} at {slot.url} was restarted and has lost its weights; it joins again")
                self._eject(slot, now, left)
            return
        slot.hear(answer, now)
        if slot.load is not None and slot.load_before is not None:
            member = next((member for member in self._router.members() if member.name == slot.name), None)
            if member is not None:
                least = self._config.grpo.num_generations_per_prompt
                limit = next_limit(member.limit, slot.load, slot.load_before, in_flight=member.load, least=least)
                self._router.limit(slot.name, limit)

    def _refuse(self, slot: Slot, fault: str) -> None:
        """An external engine cannot serve as it was started. It is asked again: somebody may start it as it should."""
        said, slot.refused = slot.refused, fault
        if said == fault:
            return
        refusal = f"external engine {slot.url} {fault}"
        if not any(other.may_serve for other in self._slots):
            raise PoolFailed(f"{refusal}; no other engine is left, so run the same command again after that")
        self._control.warn(f"{refusal}; it gets no request until then")

    def _let_go(self, slot: Slot, left: list[str]) -> None:
        """An engine that is not wanted any more leaves; what it is at is made again elsewhere if it is a local one."""
        self._leave(slot, left)
        self._slots.remove(slot)
        if slot.child is not None:
            slot.child.stop()
        if not self._slots:
            raise PoolFailed(f"{slot.name} at {slot.url} was the last engine of the pool; add one before you remove it")

    def _check_silence(self, slot: Slot, now: float, left: list[str]) -> None:
        """Give up an engine that does not answer. One that broke is out already, and only a restart mends it."""
        pool = self._config.pool
        if slot.broken is not None:
            return
        if slot.ready and now - slot.heard_at > pool.health_timeout_seconds:
            silence = (
                f"{slot.name} at {slot.url} was silent for pool.health_timeout_seconds={pool.health_timeout_seconds:g}"
            )
            if slot.child is not None:
                self._kill(slot, slot.child, silence, now, left)
                return
            self._control.warn(f"{silence}; it joins again when it answers")
            self._eject(slot, now, left)
        elif (
            not slot.ready
            and not slot.overdue
            and slot.refused is None
            and now - slot.started_at > pool.start_timeout_seconds
        ):
            late = f"{slot.name} at {slot.url} was not ready within pool.start_timeout_seconds={pool.start_timeout_seconds:g}"
            if slot.child is not None:
                self._kill(slot, slot.child, late, now, left)
                return
            slot.overdue = True
            if not any(other.may_serve for other in self._slots):
                raise PoolFailed(late)
            self._control.warn(f"{late}; the run goes on without it")

    def _kill(self, slot: Slot, child: Child, cause: str, now: float, left: list[str]) -> None:
        """End a process that is of no use any more; the next one takes its place."""
        shown = child.tail()
        child.stop()
        self._lost(slot, f"{cause}; its last lines are:\n{shown}", now, left)

    def _eject(self, slot: Slot, now: float, left: list[str]) -> None:
        """An external engine leaves, and may come back under another name."""
        losses = slot.losses_by(now) + 1
        self._leave(slot, left)
        slot.renew(slot.url, losses=losses, started_at=now)

    def _leave(self, slot: Slot, left: list[str]) -> None:
        """The process that has this name is no longer of the pool."""
        left.append(slot.name)
        self._router.leave(slot.name)
        self._prober.forget(slot.name)
        self._aborts.forget(slot.name)

    def _admit_late(self, store: ObjectStore, live: RefitRecord) -> None:
        """Admit engines that joined after the version went live, as the trainer's records name them."""
        waiting = {member.name for member in self._router.members() if not member.admitted}
        if not waiting:
            return
        stamp = f"{live.attempt}.{live.version}"
        number = self._late[1] if self._late[0] == stamp else 1
        while (record := read_refit(store, live.attempt, live.version, number)) is not None:
            for name in waiting.intersection(record.engines):
                self._router.admit(name)
            number += 1
        self._late = (stamp, number)

    def __enter__(self) -> "Engines":
        with ExitStack() as on_failure:
            on_failure.callback(self._stop)
            self.start()
            on_failure.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def _stop(self) -> None:
        """End all of them by one deadline. One that cannot be ended keeps none of the others."""
        self._prober.close()
        children = [slot.child for slot in self._slots if slot.child is not None]
        deadline = time.monotonic() + GRACE_SECONDS
        for child in children:
            child.terminate()
        with ExitStack() as all_stopped:
            for child in children:
                all_stopped.callback(child.stop, deadline)
