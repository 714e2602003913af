"""Holds the trainer in the middle of a refit over gloo, between two tensors, until a test lets it go on.

    driver.hold_refit(3)       # before the run: once one tensor has been sent three times, all its engines counted
    driver.wait_for_held_refit()
    ...                        # what is to happen in the middle of it
    driver.release_refit()

As with `store_faults`, the product has no hook for this: `install` wraps the function that sends one tensor. The file
that HOLD names has the number first, then HELD, and is gone once the test lets the trainer go on.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from functools import wraps
from pathlib import Path
from typing import Any

HOLD = "HOLD_REFIT"
HELD = "held"
POLL_SECONDS = 0.02
# Longer than a test needs; a test that fails must not leave the trainer standing.
LONGEST_SECONDS = 60.0


def install() -> None:
    """Wrap the transfer of this process, if it is a rank of a run that is to be held."""
    path = Path(os.environ.get(HOLD, ""))
    if "grpo_core.training" not in sys.orig_argv or not path.is_file() or path.read_text() == HELD:
        return
    from grpo_core.refit import gloo

    send, number, sent = gloo._broadcast, int(path.read_text()), Counter[str]()

    @wraps(send)
    def held(processes: Any, name: str, *arguments: Any) -> None:
        send(processes, name, *arguments)
        sent[name] += 1
        if sent[name] >= number and path.exists():
            path.write_text(HELD)
            deadline = time.monotonic() + LONGEST_SECONDS
            while path.exists() and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)

    gloo._broadcast = held
