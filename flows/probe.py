"""Looks at engines over HTTP, in the background: a slow or dead one keeps nobody waiting.

Contract: one look at an engine is under way at a time; its answer is picked up by whoever asks next; every call has a
deadline of seconds, and what an engine does not say in a form that we know, it has not said.
"""

import http.client
import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from grpo_core.rollout.engine import parse_metrics
from grpo_core.rollout.load import EngineLoad

ANSWER_SECONDS = 2.0
# vLLM also looks at its machine before it first says how it was started, which takes it some twenty seconds.
CONFIGURATION_SECONDS = 90.0
# Looks that run side by side. One takes milliseconds, or its deadlines when the engine hangs.
MOST_LOOKS = 32


@dataclass(frozen=True, slots=True)
class Look:
    """What an engine said: whether it is there, the version it carries, how loaded it is, and why it cannot serve."""

    healthy: bool
    stamp: str | None = None
    load: EngineLoad | None = None
    fault: str | None = None


def look(url: str) -> Look:
    """Ask an engine how it is."""
    if not responds(f"{url}/health"):
        return Look(healthy=False)
    exposition = text_of(f"{url}/metrics")
    return Look(True, carried_stamp(url), None if exposition is None else EngineLoad.of(parse_metrics(exposition)))


def examine(url: str, fault_of: Callable[[Any], str | None]) -> Look:
    """Look at an engine that somebody else started, and see whether it can serve;
    `fault_of` judges its configuration."""
    seen = look(url)
    if not seen.healthy:
        return seen
    try:
        with urllib.request.urlopen(f"{url}/server_info?config_format=json", timeout=CONFIGURATION_SECONDS) as answer:
            configuration = json.loads(answer.read())
    except urllib.error.HTTPError:
        configuration = None
    except (OSError, http.client.HTTPException):
        return Look(healthy=False)
    except (ValueError, RecursionError):
        configuration = None
    return replace(seen, fault=fault_of(configuration))


class Prober:
    """Looks at engines by name."""

    def __init__(self, look: Callable[[str], Look] = look, clock: Callable[[], float] = time.monotonic) -> None:
        self._look = look
        self._clock = clock
        self._threads = ThreadPoolExecutor(MOST_LOOKS, thread_name_prefix="probe")
        self._due: dict[str, float] = {}
        self._under_way: dict[str, Future[Look]] = {}

    def ask(self, name: str, url: str, every_seconds: float, look: Callable[[str], Look] | None = None) -> Look | None:
        """The answer of the last look, once; begin the next one when its time has come, as `look` or as usual."""
        answer = None
        if name in self._under_way:
            if not self._under_way[name].done():
                return None
            answer = self._under_way.pop(name).result()
        if self._clock() >= self._due.get(name, -math.inf):
            self._due[name] = self._clock() + every_seconds
            self._under_way[name] = self._threads.submit(look or self._look, url)
        return answer

    def forget(self, name: str) -> None:
        """An engine that is looked at no more."""
        self._due.pop(name, None)
        self._under_way.pop(name, None)

    def close(self) -> None:
        """Wait for nothing: every look ends by its own deadlines."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def responds(url: str) -> bool:
    """Whether a GET answers 200 within a moment."""
    return text_of(url) is not None


def carried_stamp(url: str) -> str | None:
    """The version an engine says it carries; None when it gives no answer that says so."""
    try:
        return str(json.loads(text_of(f"{url}/weight_info") or "")["weight_version"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None  # it is dying, or not an engine any more; its process or the next refit tells


def text_of(url: str) -> str | None:
    """The body of an answer of 200; None for anything else, and for none within a moment."""
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as answer:
            return answer.read().decode() if answer.status == 200 else None
    except (OSError, http.client.HTTPException, UnicodeDecodeError):
        return None
