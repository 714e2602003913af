"""The pool's engines as the flow sees them: started, watched, replaced, and announced to the trainer.

Invariants: an engine process has a name that is never used again; the trainer learns of every join and leave from
numbered records; an engine gets requests only once it carries the newest live version; an engine that dies is replaced
within its budget of restarts, and beyond it the run fails with the engine's last lines.
"""

import http.client
import json
import os
import sys
import time
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from flows.control import Control
from flows.supervise import Child, Command
from grpo_core.config import LOOPBACK, ExternalPool, LocalPool, RunConfig
from grpo_core.ports import free_port, port_is_free
from grpo_core.rollout.launch import EngineSpec, engine_command
from grpo_core.rollout.pool import Pool
from storage.objects import ObjectStore
from storage.pool import PoolChange, RefitRecord, write_pool_change

PROBE_SECONDS = 0.5
# Of all engines together: with the trainer's own before it, the whole run is gone within fifteen seconds.
GRACE_SECONDS = 3.0
CPU_KV_CACHE_BYTES = 256 << 20
# vLLM on CPU takes whole pages of 32 tokens; a larger page would never be shared by short prompts.
CPU_BLOCK_TOKENS = 32


class PoolFailed(RuntimeError):
    """The pool cannot serve; the message names the engine and shows its last lines."""


@dataclass(slots=True)
class Slot:
    """The place of one engine in the pool; processes come and go in it."""

    number: int
    url: str
    name: str
    child: Child | None = None
    started_at: float = 0.0
    ready: bool = False
    restarts: int = 0
    probed_at: float = 0.0
    broken: str | None = None


class Engines:
    """Every engine of the pool. Use as a context: leaving it stops the local ones."""

    def __init__(self, config: RunConfig, policy_directory: Path, logs: Path, router: Pool, control: Control) -> None:
        self._config = config
        self._policy = policy_directory
        self._logs = logs
        self._router = router
        self._control = control
        self._slots: list[Slot] = []
        self._changes = 0
        self._announced: set[str] = set()

    def start(self) -> None:
        """Start the local engines, or take the external ones as they are. Does not wait for them."""
        pool = self._config.pool
        if isinstance(pool, ExternalPool):
            self._slots = [Slot(number, url, f"engine-{number}") for number, url in enumerate(pool.urls)]
            for slot in self._slots:
                slot.started_at = time.monotonic()
            return
        if pool.host not in LOOPBACK:
            self._control.warn(
                f"pool.host={pool.host}: the engines' control routes have no authentication and are now open to that network"
            )
        for number in range(pool.engines):
            port = pool.port + number if pool.port else free_port(pool.host)
            slot = Slot(number, f"http://{pool.host}:{port}", f"engine-{number}")
            self._slots.append(slot)
            self._launch(slot, pool, port)

    def _launch(self, slot: Slot, pool: LocalPool, port: int) -> None:
        if not port_is_free(pool.host, port):
            raise PoolFailed(
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
        slot.started_at, slot.ready = time.monotonic(), False
        self._control.watch(slot.name, slot.child.poll)

    def begin_attempt(self) -> None:
        """Membership records are per attempt: a new one announces every ready engine again."""
        self._changes = 0
        self._announced.clear()

    def watch(self, store: ObjectStore, attempt: int, live: RefitRecord | None) -> None:
        """One round: note who became ready, who died, and who carries the newest version by now. Raise PoolFailed."""
        joined: dict[str, str] = {}
        left = self.probe()
        for slot in self._slots:
            if slot.ready and slot.name not in self._announced:
                joined[slot.name] = slot.url
                self._router.join(slot.name, slot.url)
        if joined or left:
            write_pool_change(
                store,
                attempt,
                self._changes,
                PoolChange(joined, tuple(name for name in left if name in self._announced)),
            )
            self._changes += 1
            self._announced = (self._announced | joined.keys()) - set(left)
        if live is not None:
            self._admit_late(live)

    def probe(self) -> list[str]:
        """Look after the processes alone; the names of those that died and were replaced. Raise PoolFailed."""
        left: list[str] = []
        for slot in list(self._slots):
            self._check_alive(slot, left)
        for slot in self._slots:
            if not slot.ready and time.monotonic() - slot.probed_at > PROBE_SECONDS:
                self._probe(slot)
        return left

    def replace(self, broken: Mapping[str, str]) -> None:
        """Kill engines that a refit broke (name → how); the next round starts new ones. Raise PoolFailed."""
        for slot in self._slots:
            if slot.name not in broken or slot.broken is not None:
                continue
            slot.broken = broken[slot.name]
            if slot.child is None:
                raise PoolFailed(
                    f"external engine {slot.url} failed a refit ({slot.broken}) and holds unknown weights; "
                    "restart it and run the same command again"
                )
            slot.child.stop()

    def _check_alive(self, slot: Slot, left: list[str]) -> None:
        if slot.child is None or slot.child.poll() is None:
            return
        pool = self._config.pool
        assert isinstance(pool, LocalPool)
        failure = f"{slot.name} broke in a refit: {slot.broken}" if slot.broken else str(slot.child.failure())
        slot.child.stop()
        if not slot.ready:
            raise PoolFailed(f"the engine died while it was starting: {failure}")
        if slot.restarts >= pool.max_restarts:
            raise PoolFailed(
                f"engine {slot.number} was lost {slot.restarts + 1} times, more than "
                f"pool.max_restarts={pool.max_restarts} allows: {failure}"
            )
        self._control.warn(f"{failure}\nIt is started again.")
        left.append(slot.name)
        self._router.leave(slot.name)
        port = free_port(pool.host)
        restarts = slot.restarts + 1
        renewed = replace(
            slot,
            name=f"engine-{slot.number}-{restarts}",
            url=f"http://{pool.host}:{port}",
            restarts=restarts,
            child=None,
            broken=None,
        )
        self._slots[slot.number] = renewed
        self._launch(renewed, pool, port)

    def _probe(self, slot: Slot) -> None:
        slot.probed_at = time.monotonic()
        if responds(f"{slot.url}/health"):
            slot.ready = True
        elif slot.probed_at - slot.started_at > self._config.pool.start_timeout_seconds:
            shown = "" if slot.child is None else f"; its last lines are:\n{slot.child.tail()}"
            raise PoolFailed(
                f"{slot.name} at {slot.url} was not ready within pool.start_timeout_seconds={self._config.pool.start_timeout_seconds:g}{shown}"
            )

    def _admit_late(self, live: RefitRecord) -> None:
        """Admit engines that joined after the version went live, once they say that they carry it.

        An engine that a refit broke may say so too: it says what it was told, not what it holds.
        """
        stamp = f"{live.attempt}.{live.version}"
        waiting = {member.name for member in self._router.members() if not member.admitted} - set(live.engines)
        for slot in self._slots:
            if slot.name not in waiting or slot.broken is not None:
                continue
            if time.monotonic() - slot.probed_at > PROBE_SECONDS:
                slot.probed_at = time.monotonic()
                if carried_stamp(slot.url) == stamp:
                    self._router.admit(slot.name)

    def all_ready(self) -> bool:
        """Whether every engine has answered since it was last started."""
        return all(slot.ready for slot in self._slots)

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
        children = [slot.child for slot in self._slots if slot.child is not None]
        deadline = time.monotonic() + GRACE_SECONDS
        for child in children:
            child.terminate()
        with ExitStack() as all_stopped:
            for child in children:
                all_stopped.callback(child.stop, deadline)


def engine_spec(config: RunConfig, pool: LocalPool, policy: Path, number: int, port: int) -> EngineSpec:
    """What to start for engine `number`. Pure."""
    on_cpu = pool.device == "cpu"
    return EngineSpec(
        model=str(policy),
        host=pool.host,
        port=port,
        device=pool.device,
        dtype=config.model.dtype,
        # Engines with one seed would draw the same noise for requests without their own.
        seed=1000 * config.seed + number,
        max_model_len=config.model.context_length,
        max_num_seqs=pool.max_num_seqs,
        max_num_batched_tokens=max(pool.max_num_batched_tokens, config.model.context_length),
        tensor_parallel_size=pool.tensor_parallel_size,
        transfer=config.refit.backend,
        block_size=CPU_BLOCK_TOKENS if on_cpu else None,
        kv_cache_bytes=pool.kv_cache_bytes or (CPU_KV_CACHE_BYTES if on_cpu else None),
        gpu_memory_utilization=None if on_cpu else pool.gpu_memory_utilization,
        gpus=pool.gpus[number] if pool.gpus else (),
        enforce_eager=pool.enforce_eager,
        extra_arguments=pool.extra_arguments,
        extra_environment=(("OMP_NUM_THREADS", str(pool.threads)), ("HF_HUB_OFFLINE", "1")) if on_cpu else (),
    )


def responds(url: str) -> bool:
    """Whether a GET answers 200 within a moment."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def carried_stamp(url: str) -> str | None:
    """The version an engine says it carries; None when it gives no answer that says so."""
    try:
        with urllib.request.urlopen(f"{url}/weight_info", timeout=2) as answer:
            return str(json.load(answer)["weight_version"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return None  # it is dying, or not an engine any more; its process or the next refit tells
