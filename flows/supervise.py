"""Child processes that never outlive the flow.

Contract: a child gets a session of its own, so one signal reaches all it started; it is told to end by SIGTERM, then
SIGKILL after its grace; when this process dies, however it dies, a guardian that holds the other end of a pipe kills
it and all that descends from it. Nobody else is ever killed: the number of a process that has ended may be another's
by then. Every wait has a deadline. Start children from any thread. `Child.tail` is what to show when it ends badly.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

TAIL_BYTES = 4096
# A process is gone within moments of SIGKILL, unless it hangs in the kernel.
KILL_SECONDS = 10.0
# Runs beside each child. It reads a pipe that only the flow holds open: end of file means that the flow is gone or that
# the child has ended, and then what is left of it goes too, however deep and whatever its session (torchrun gives each
# rank one of its own). PR_SET_PDEATHSIG would not reach that far. The child is older than its guardian: a younger
# process of that number is a stranger. It imports nothing before it is needed, so it costs nothing.
GUARDIAN = """
import os, signal, sys
child = int(sys.argv[1])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while os.read(0, 1):
    pass
sys.path.append(sys.argv[2])
import psutil
try:
    process = psutil.Process(child)
    if process.create_time() > psutil.Process().create_time():
        raise SystemExit
    descendants = process.children(recursive=True)
except psutil.NoSuchProcess:
    descendants = []
try:
    os.killpg(child, signal.SIGKILL)
except ProcessLookupError:
    pass
for process in descendants:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        pass
"""


class ChildFailed(RuntimeError):
    """A child process that ended when it should not have; the message shows its last lines."""


@dataclass(frozen=True, slots=True)
class Command:
    """What to start. `environment` is the whole environment; it may hold keys, so it is never printed."""

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    grace_seconds: float = 10.0


class Child:
    """One running child process and its guardian."""

    def __init__(self, command: Command) -> None:
        self.command = command
        command.log.parent.mkdir(parents=True, exist_ok=True)
        with command.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                list(command.arguments),
                env=dict(command.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._descendants: set[psutil.Process] = set()
        self._guardian = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", GUARDIAN, str(self._process.pid), str(Path(psutil.__file__).parents[1])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its session and process group."""
        return self._process.pid

    def poll(self) -> int | None:
        """The exit status, or None while it runs. Once it has ended,
        its guardian ends what it left behind, and itself."""
        status = self._process.poll()
        if status is not None:
            self._end_of_guard().close()
            self._guardian.poll()
        return status

    def wait(self, seconds: float) -> int:
        """The exit status. Raise subprocess.TimeoutExpired."""
        return self._process.wait(seconds)

    def tail(self, lines: int = 15) -> str:
        """The last lines it has written since this start."""
        with self.command.log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - TAIL_BYTES))
            text = log.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def failure(self) -> ChildFailed:
        """Why its end is an error, in one sentence and its last lines."""
        status = self.poll()
        how = (
            f"was killed by {signal.Signals(-status).name}"
            if status is not None and status < 0
            else f"exited with status {status}"
        )
        return ChildFailed(f"{self.command.name} {how}; its last lines, of {self.command.log}, are:\n{self.tail()}")

    def terminate(self) -> None:
        """Ask the whole session to end; `stop` sees to it that it does."""
        self._remember_descendants()
        self._signal(signal.SIGTERM)

    def stop(self, deadline: float | None = None) -> None:
        """End it and all that descends from it: SIGTERM, its grace, SIGKILL. Raise ChildFailed if even that fails.

        `deadline`, on the monotonic clock, replaces the end of its own grace, so that several can share one.
        """
        if deadline is None:
            deadline = time.monotonic() + self.command.grace_seconds
        self.terminate()
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._remember_descendants()
            self._signal(signal.SIGKILL)
        try:
            self._process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise ChildFailed(
                f"{self.command.name} (process {self.pid}) still runs {KILL_SECONDS:g} s after SIGKILL: it hangs in the "
                "kernel; look at its devices and file systems"
            ) from error
        # What it had started may linger when it did not take its own children along.
        self._signal(signal.SIGKILL)
        for process in self._descendants:
            # psutil compares start times, so it never kills another process of that number.
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._guardian.kill()
        self._end_of_guard().close()
        self._guardian.wait(KILL_SECONDS)

    def _end_of_guard(self) -> IO[bytes]:
        """The pipe whose end the guardian waits for."""
        assert self._guardian.stdin is not None
        return self._guardian.stdin

    def _remember_descendants(self) -> None:
        """Those with a session of their own too, which a signal to our group does not reach.

        Once their parent has ended they are no longer found, so they are noted before each signal.
        """
        with contextlib.suppress(psutil.NoSuchProcess):
            if self._process.returncode is None:
                self._descendants |= set(psutil.Process(self.pid).children(recursive=True))

    def _signal(self, number: signal.Signals) -> None:
        """To its whole group; what it left behind keeps the group's number from being given away."""
        if self._process.returncode is not None and psutil.pid_exists(self.pid):
            return  # it has ended with all its group, and the number is another process's by now
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return  # already gone, which is what was wanted

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
