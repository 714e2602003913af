"""Real vLLM engines on the CPU for tests. Starting one takes a minute, so one is shared as widely as possible.

A test that uses the shared `vllm_engine` finds it with the weights of whichever test ran before: it refits first.
It leaves it alive and resumed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import pytest
import requests
import torch

from grpo_core.rollout.launch import EngineSpec, engine_command

CONTEXT = 2048
START_SECONDS = 400
STOP_SECONDS = 15


@dataclass(frozen=True)
class RunningEngine:
    """An engine that answers, and the model it was started from. `process` leads a process group of its own."""

    model: Path
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def memory(self) -> int:
        """Resident bytes of all its processes."""
        leader = psutil.Process(self.process.pid)
        return sum(process.memory_info().rss for process in [leader, *leader.children(recursive=True)])

    def kill(self) -> None:
        """SIGKILL for all of the engine's processes."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_SECONDS)


def write_tiny_model(
    directory: Path,
    family: Literal["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"],
    *,
    tied: bool,
    vocabulary_size: int = 128,
    hidden_size: int = 128,
    **sizes: int,
) -> Path:
    """A random model of about 0.3M parameters with head_dim 32, which the CPU engine needs. `sizes` are more entries of
    the family's config. Returns `directory`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=vocabulary_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        **sizes,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


@contextmanager
def running_engines(
    models: list[Path],
    directory: Path,
    *,
    transfer: str = "gloo",
    tensor_parallel_size: int = 1,
    lora_rank: int | None = None,
) -> Iterator[list[RunningEngine]]:
    """One engine per model, started at the same time, all stopped at the end. Logs go to `directory`."""
    engines: list[RunningEngine] = []
    try:
        for number, model in enumerate(models):
            engines.append(_spawn(model, directory, number, transfer, tensor_parallel_size, lora_rank))
        deadline = time.monotonic() + START_SECONDS
        for engine in engines:
            _await_healthy(engine, deadline)
        yield engines
    finally:
        for engine in engines:
            _stop(engine)


@pytest.fixture(scope="session")
def vllm_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """One engine for the whole test session: a tiny Qwen3 with an untied head, vocabulary 128, context 2048."""
    directory = tmp_path_factory.mktemp("vllm")
    model = write_tiny_model(directory / "model", "qwen3", tied=False)
    with running_engines([model], directory) as engines:
        yield engines[0]


def _spawn(
    model: Path, directory: Path, number: int, transfer: str, tensor_parallel_size: int, lora_rank: int | None
) -> RunningEngine:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spec = EngineSpec(
        model=str(model),
        host="127.0.0.1",
        port=port,
        device="cpu",
        dtype="float32",
        seed=100 + number,
        max_model_len=CONTEXT,
        max_num_seqs=64,
        max_num_batched_tokens=CONTEXT,
        tensor_parallel_size=tensor_parallel_size,
        transfer=transfer,
        lora_rank=lora_rank,
        block_size=32,
        kv_cache_bytes=64 << 20,
        extra_arguments=("--enable-prompt-tokens-details",),
        extra_environment=(("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1")),
    )
    command = engine_command(spec, os.environ)
    log = directory / f"engine-{number}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command.arguments,
            env=dict(command.environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return RunningEngine(model, f"http://127.0.0.1:{port}", process, log)


def _await_healthy(engine: RunningEngine, deadline: float) -> None:
    while True:
        if engine.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the engine did not start; its log ends:\n{_tail(engine.log)}")
        try:
            if requests.get(engine.url + "/health", timeout=3).status_code == 200:
                return
        except requests.RequestException:
            time.sleep(0.5)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-30:])


def _stop(engine: RunningEngine) -> None:
    """Ask, then kill; the whole group, since workers outlive a killed server."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(engine.process.pid, sign)
        except ProcessLookupError:
            return
        try:
            engine.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            continue
