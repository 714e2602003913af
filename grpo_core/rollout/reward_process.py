"""One reward worker as its parent sees it: groups go in, answers and ticks come out. All on one event loop.

`call` ends with the answer, with RewardError for what is the group's own fault, or with WorkerLost when the process was
lost and any of its groups may be to blame. A process that says what no worker says is ended, and so is lost.

A process is over when it has exited, though something that was forked from it may hold its output open for ever; with
it ends whatever it started in its session. Ending one never raises, so that nothing hides why it was ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from grpo_core.config import RewardsConfig
from grpo_core.rollout.reward_worker import OUT_OF_MEMORY, TICK_SECONDS

START_SECONDS = 120.0
# A worker is gone within moments of being killed.
END_SECONDS = 10.0
EXIT_POLL_SECONDS = 0.05
# What a worker said before it exited is in its pipe by then.
LAST_WORDS_SECONDS = 1.0
# A worker that was silent for so long while it had groups is held up as a whole.
SILENT_SECONDS = 5.0
# Longest line that a worker may answer, bytes.
LONGEST_LINE = 1 << 26

Components = dict[str, list[float | None]]


class RewardError(RuntimeError):
    """A group that could not be scored; the message names the function and the cause."""


class WorkerLost(RuntimeError):
    """A worker that ended, or no longer ticks, while it had groups; the message says how."""


class RewardProcess:
    """A child process. It takes groups until it is lost, or late with one of them."""

    def __init__(self, config: RewardsConfig, process: asyncio.subprocess.Process) -> None:
        self._config = config
        self._names = ", ".join(source.function for source in config.functions)
        self._process = process
        self._calls: dict[int, asyncio.Future[Components]] = {}
        self._last_call = 0
        self._heard = time.monotonic()
        self._hello: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.ensure_future(self._read())
        self.takes_calls = True

    @classmethod
    async def start(cls, config: RewardsConfig) -> RewardProcess:
        """A new process; it imports the functions while we go on."""
        names = [source.function for source in config.functions]
        paths = [str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "grpo_core.rollout.reward_worker", str(config.worker_memory_bytes), *names),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            limit=LONGEST_LINE,
            # A session of its own: a Ctrl-C in the terminal is for the flow, which then closes us.
            start_new_session=True,
        )
        return cls(config, process)

    @property
    def load(self) -> int:
        """Groups it is scoring."""
        return len(self._calls)

    async def ready(self) -> None:
        """Wait until the functions are imported. Raise RewardError with the import's own words."""
        try:
            async with asyncio.timeout(START_SECONDS):
                await asyncio.shield(self._hello)
        except TimeoutError as error:
            await self.end()
            raise RewardError(
                f"reward worker did not finish importing the reward functions ({self._names}) within {START_SECONDS:g} s"
            ) from error

    async def call(self, call: dict[str, Any], *, must_tick: bool = True) -> Components:
        """Score one group. Without `must_tick` only the deadline counts. Raise RewardError, WorkerLost."""
        await self.ready()
        assert self._process.stdin is not None
        self._last_call += 1
        number = self._last_call
        line = _line({**call, "id": number})
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            if self._process.stdin.is_closing() or self._reader.done():
                raise WorkerLost(self._death())
            self._heard = time.monotonic()
            self._process.stdin.write(line)
            return await self._answer(answer, must_tick)
        finally:
            del self._calls[number]
            if not self.takes_calls and not self._calls:
                await self.end()

    async def _answer(self, answer: asyncio.Future[Components], must_tick: bool) -> Components:
        seconds = self._config.timeout_seconds
        deadline = time.monotonic() + seconds
        silent = 0
        while not answer.done():
            now = time.monotonic()
            if now >= deadline:
                self.takes_calls = False
                raise RewardError(
                    f"reward worker did not finish scoring ({self._names}) within {seconds:g} s; raise rewards.timeout_seconds"
                )
            # Twice in a row, since after a pause of our own the ticks of that time are still to be read.
            silent = silent + 1 if must_tick and now - self._heard > SILENT_SECONDS else 0
            if silent > 1:
                self._lose(WorkerLost(f"reward worker was held up for {SILENT_SECONDS:g} s ({self._names})"))
                break
            await asyncio.wait({answer}, timeout=min(TICK_SECONDS, deadline - now))
        return await answer

    async def _read(self) -> None:
        """Take in what the process says, until its end."""
        listening = asyncio.ensure_future(self._listen())
        # Not Process.wait, which in some versions of Python waits for the end of the output too.
        while self._process.returncode is None:
            await asyncio.sleep(EXIT_POLL_SECONDS)
        # What a reward function started may outlive the worker that crashed.
        self._kill()
        await asyncio.wait({listening}, timeout=LAST_WORDS_SECONDS)
        listening.cancel()
        # There is no public way to let go of an output that somebody else holds open.
        self._process._transport.close()  # type: ignore[attr-defined]
        self._lose(WorkerLost(self._death()))

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                self._heard = time.monotonic()
                self._hear(line)
        except (ValueError, RecursionError) as error:
            self._lose(WorkerLost(f"reward worker said what no worker says ({self._names}): {error}"))

    def _hear(self, line: bytes) -> None:
        """Take in one line. Raise ValueError for nonsense."""
        said = json.loads(line)
        if not isinstance(said, dict):
            raise ValueError(f"{line[:100]!r} is not an object")
        if "id" in said:
            self._settle(said)
        elif not self._hello.done():
            if "error" in said:
                self._refuse(RewardError(str(said["error"])))
            else:
                self._hello.set_result(None)

    def _refuse(self, error: RewardError) -> None:
        """The functions cannot be used; whoever asks hears why."""
        self.takes_calls = False
        self._hello.set_exception(error)
        # Nobody may ask, which is no reason for a warning.
        self._hello.exception()

    def _settle(self, said: dict[str, Any]) -> None:
        number = said["id"]
        answer = self._calls.get(number) if isinstance(number, int) else None
        if answer is None or answer.done():
            return
        if "error" in said:
            answer.set_exception(RewardError(str(said["error"])))
        else:
            answer.set_result(
                components_of(said.get("rewards"), [source.function for source in self._config.functions])
            )

    def _lose(self, cause: WorkerLost) -> None:
        """The process is gone, or must go; all its groups hear why."""
        self.takes_calls = False
        if self._process.returncode is None:
            self._kill()
        if not self._hello.done():
            self._refuse(RewardError(f"{cause}, while it imported the reward functions"))
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(cause)

    def _death(self) -> str:
        status = self._process.returncode
        if status == OUT_OF_MEMORY:
            return f"reward worker needed more than rewards.worker_memory_bytes={self._config.worker_memory_bytes} ({self._names})"
        return f"reward worker died with status {status} while scoring ({self._names}); see its last lines above"

    def _kill(self) -> None:
        """Kill the process and what was started from it: it leads a group of its own."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self) -> None:
        """Kill the process and wait for its end, END_SECONDS at most. Never raises."""
        self.takes_calls = False
        if self._process.returncode is None:
            self._kill()
        await asyncio.wait({self._reader}, timeout=END_SECONDS)


def components_of(rewards: Any, names: Sequence[str]) -> Components:
    """What a worker answered about one group: of each function a list of numbers and None. Raise ValueError."""
    if not isinstance(rewards, dict) or rewards.keys() != set(names):
        raise ValueError(f"{str(rewards)[:100]!r} are not the rewards of {', '.join(names)}")
    for name, values in rewards.items():
        if not isinstance(values, list) or not all(value is None or type(value) in (int, float) for value in values):
            raise ValueError(f"{str(values)[:100]!r} are not rewards of {name}")
    return {name: rewards[name] for name in names}


def _line(call: dict[str, Any]) -> bytes:
    """The group as the worker reads it; what JSON has no word for is sent as its text. Raise RewardError."""
    try:
        return json.dumps(call, default=str).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise RewardError(
            f"a group cannot be sent to its reward worker: {error}; keep to JSON values in the columns of the data"
        ) from error


@asynccontextmanager
async def alone(config: RewardsConfig) -> AsyncIterator[RewardProcess]:
    """A worker for one group."""
    process = await RewardProcess.start(config)
    try:
        yield process
    finally:
        await process.end()
