"""Children never outlive the flow, and say why they ended."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from flows.supervise import GUARDIAN, Child, ChildFailed, Command

DEEP = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)']); time.sleep(300)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(300)"
)


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
from flows.supervise import GUARDIAN, Child, ChildFailed, Command
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


def test_a_guardian_does_not_kill_a_younger_process_of_the_same_number(tmp_path: Path) -> None:
    packages = str(Path(psutil.__file__).parents[1])
    # Forked before its charge, and told the number afterwards.
    guardian = subprocess.Popen(
        ["sh", "-c", f'read pid; exec {sys.executable} -S -E -c "$0" "$pid" {packages}', GUARDIAN],
        stdin=subprocess.PIPE,
    )
    assert guardian.stdin is not None
    time.sleep(0.05)
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
    try:
        guardian.stdin.write(f"{stranger.pid}\n".encode())
        guardian.stdin.close()
        assert guardian.wait(20) == 0
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_stop_after_the_end_signals_nobody_who_got_the_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = Child(command(tmp_path, "pass"))
    child.wait(20)
    sent: list[int] = []
    monkeypatch.setattr(psutil, "pid_exists", lambda pid: True)
    monkeypatch.setattr(os, "killpg", lambda pid, number: sent.append(pid))
    child.stop()
    assert sent == []


def test_the_guardian_of_a_child_that_ended_ends_what_it_left_behind_and_goes(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])"
    child = Child(command(tmp_path, code))
    try:
        child.wait(20)
        assert len(session(child.pid)) == 1
        assert child.poll() == 0
        wait_until(lambda: session(child.pid) == [])
        guardian = psutil.Process(child._guardian.pid)
        wait_until(lambda: child.poll() == 0 and not guardian.is_running())
    finally:
        child.stop()


def test_children_that_ignore_sigterm_share_one_deadline(tmp_path: Path) -> None:
    children = [Child(command(tmp_path / str(number), STUBBORN, grace=300)) for number in range(2)]
    for child in children:
        wait_until(lambda child=child: "ready" in child.tail())
    for child in children:
        child.stop(time.monotonic())
    assert [child.poll() for child in children] == [-signal.SIGKILL] * 2


def test_a_child_that_survives_sigkill_is_named_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = Child(command(tmp_path, "import time; time.sleep(300)", grace=0.0))
    with monkeypatch.context() as patch:
        patch.setattr("flows.supervise.KILL_SECONDS", 0.1)
        patch.setattr(os, "killpg", lambda pid, number: None)
        with pytest.raises(ChildFailed, match=rf"child \(process {child.pid}\) still runs 0.1 s after SIGKILL"):
            child.stop()
    child.stop()
