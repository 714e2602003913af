"""Faults at the store's writes, in the real processes of a run and without any hook in the product.

    driver.arm(Fault("trainer rank", r"create ledger/000001/.*step-000000003\\.parquet", "before", "kill"))

`sitecustomize.py`, which Python imports at the start of every process of a run, calls `install`. It wraps what
`storage.objects` itself calls, so a fault meets the store's own retries and translation of errors, on a local
directory and on S3 alike. A write is named by its call and its key: `create`, `put`, `upload`, `delete` or `clear` (all
below a prefix), and `open` for the files of a checkpoint that are written straight into a local store, which is seen
only before it happens.

Invariants: the armed faults are those of the JSON file that STORE_FAULTS names, read again at every write, so a test
may arm and disarm while the run goes on; a fault is taken out of the file before it happens, so it happens once,
unless it is `lasting`. Occurrences are counted in each process for itself.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Literal

Part = Literal["flow", "torchrun", "trainer rank"]
Moment = Literal["before", "after"]
Action = Literal["kill", "stop", "full", "fail", "delay"]

FAULTS = "STORE_FAULTS"
DELAY_SECONDS = 2.0
# Method of a kind of storage → how a fault names the call, and which argument is the key.
CALLS = {
    "create": ("create", 0),
    "put": ("put", 0),
    "upload_file": ("upload", 1),
    "delete": ("delete", 0),
    "delete_all": ("clear", 0),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to `part` at the `occurrence`-th write whose "call key" matches `write` from its beginning.

    kill, stop: SIGKILL or SIGSTOP for the process itself. full: no space left. fail: an input/output error; after the
    write this is a lost answer. delay: DELAY_SECONDS pass.
    """

    part: Part
    write: str
    moment: Moment
    action: Action
    occurrence: int = 1
    lasting: bool = False


def part_of(words: Sequence[str]) -> Part | None:
    """Which part of a run the process with this command line is."""
    if "torch.distributed.run" in words:
        return "torchrun"
    if "grpo_core.training" in words:
        return "trainer rank"
    return "flow" if any(word.endswith("/forebay") for word in words[:3]) else None


def arm(path: Path, faults: Iterable[Fault]) -> None:
    """Make these the armed faults."""
    with _locked(path):
        _write(path, list(faults))


def armed(path: Path) -> list[Fault]:
    """The faults that have not happened yet."""
    with _locked(path):
        return _read(path)


def install() -> None:
    """Put the armed faults into this process, if it is a part of a run that writes to the store."""
    part = part_of(sys.orig_argv)
    if FAULTS not in os.environ or part not in ("flow", "trainer rank"):
        return
    from storage.local import LocalObjects
    from storage.remote import FsspecObjects

    striker = Striker(Path(os.environ[FAULTS]), part)
    for kind in (LocalObjects, FsspecObjects):
        for method, (call, position) in CALLS.items():
            setattr(kind, method, _struck(getattr(kind, method), call, position, striker.strike))
    sys.addaudithook(_opening(striker.strike))


class Striker:
    """The faults of one process. `strike` is called before and after each write."""

    def __init__(self, path: Path, part: Part) -> None:
        self._path = path
        self._part = part
        self._seen: Counter[Fault] = Counter()
        self._alone = threading.Lock()

    def strike(self, write: str, moment: Moment) -> None:
        """Let the armed fault of this write happen, if there is one."""
        with self._alone:
            fault = self._due(write, moment)
            if fault is not None and fault.action == "stop":
                # In here no other thread of this process holds the file's lock, which would stand still with it.
                os.kill(os.getpid(), signal.SIGSTOP)
        match fault and fault.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), write)
            case "fail":
                raise OSError(errno.EIO, os.strerror(errno.EIO), write)
            case "delay":
                time.sleep(DELAY_SECONDS)

    def _due(self, write: str, moment: Moment) -> Fault | None:
        if not self._path.exists():
            return None
        with _locked(self._path):
            faults = _read(self._path)
            for fault in faults:
                if (fault.part, fault.moment) != (self._part, moment) or not re.match(fault.write, write):
                    continue
                self._seen[fault] += 1
                if self._seen[fault] < fault.occurrence:
                    continue
                if not fault.lasting:
                    _write(self._path, [other for other in faults if other is not fault])
                return fault
        return None


def _struck(
    method: Callable[..., Any], call: str, position: int, strike: Callable[[str, Moment], None]
) -> Callable[..., Any]:
    @wraps(method)
    def struck(self: Any, *arguments: Any) -> Any:
        write = f"{call} {arguments[position]}"
        strike(write, "before")
        result = method(self, *arguments)
        strike(write, "after")
        return result

    return struck


def _opening(strike: Callable[[str, Moment], None]) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that sees the files of a checkpoint being opened to be written."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str) or not isinstance(arguments[2], int):
            return
        _, below, key = arguments[0].partition("/checkpoints/")
        if below and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            strike(f"open checkpoints/{key}", "before")

    return hook


def _read(path: Path) -> list[Fault]:
    return [Fault(**fields) for fields in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []


def _write(path: Path, faults: list[Fault]) -> None:
    path.write_text(json.dumps([asdict(fault) for fault in faults]), encoding="utf-8")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
