"""Children never outlive the flow, and say why they ended."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from flows.supervise import Child, Command

DEEP = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)']); time.sleep(300)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(300)"


def command(tmp_path: Path, code: str, grace: float = 5.0) -> Command:
    return Command("child", [sys.executable, "-c", code], os.environ, tmp_path / "child.log", grace_seconds=grace)


def session(pid: int) -> list[psutil.Process]:
    """Living processes of the session that `pid` leads."""
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        try:
            if os.getsid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return found


def wait_until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.05)


def test_stopping_a_child_ends_everything_it_started(tmp_path: Path) -> None:
    child = Child(command(tmp_path, DEEP))
    wait_until(lambda: len(session(child.pid)) == 2)
    child.stop()
    assert session(child.pid) == []


def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    child = Child(command(tmp_path, STUBBORN, grace=0.5))
    wait_until(lambda: "ready" in child.tail())
    child.stop()
    assert child.poll() == -signal.SIGKILL


def test_kill_of_the_flow_takes_the_whole_session_along(tmp_path: Path) -> None:
    flow = f"""
import os, sys, time
from pathlib import Path
from flows.supervise import Child, Command
child = Child(Command("child", [sys.executable, "-c", {DEEP!r}], os.environ, Path({str(tmp_path / "child.log")!r})))
print(child.pid, flush=True)
time.sleep(300)
"""
    process = subprocess.Popen([sys.executable, "-c", flow], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    wait_until(lambda: len(session(pid)) == 2)
    process.kill()
    process.wait()
    wait_until(lambda: session(pid) == [])


def test_a_failure_names_the_signal_or_status_and_shows_the_last_lines(tmp_path: Path) -> None:
    child = Child(command(tmp_path, "print('first'); print('no such weights'); raise SystemExit(3)"))
    child.wait(20)
    assert "exited with status 3" in str(child.failure()) and "no such weights" in str(child.failure())
    child.stop()


def test_the_tail_is_that_of_this_start_only(tmp_path: Path) -> None:
    for word in ("earlier", "later"):
        child = Child(command(tmp_path, f"print({word!r})"))
        child.wait(20)
        shown = child.tail()
        child.stop()
    assert shown == "later"


def test_a_command_that_does_not_exist_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Child(Command("child", ["/no/such/program"], os.environ, tmp_path / "child.log"))
