"""Requests are ended on their engines, in the background.

Contract: an engine is told of all its requests in one call, and has one such call at a time, so that one which hangs
costs a thread of its own and keeps nobody waiting. What it could not be told it is told later. Nobody is told twice.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from grpo_core.background import call_in_background
from grpo_core.refit.control import ControlError, EngineAddress, EngineControl
from grpo_core.rollout.pool import InFlight

ABORT_SECONDS = 10.0


class Aborts:
    """Who was told to end what."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._under_way: dict[str, Future[None]] = {}

    def end(self, requests: Mapping[str, InFlight], serving: Collection[str]) -> None:
        """End these requests, by their ids, on the engines that serve.
        Those of other engines have ended by themselves."""
        self._told &= requests.keys()
        by_engine: dict[str, list[InFlight]] = defaultdict(list)
        for name in sorted(requests.keys() - self._told):
            by_engine[requests[name].engine].append(requests[name])
        for engine in by_engine.keys() & serving:
            if engine in self._under_way:
                if not self._under_way[engine].done():
                    continue
                self._under_way.pop(engine).result()
            self._under_way[engine] = call_in_background(partial(abort, by_engine[engine]))
            self._told |= {request.request_id for request in by_engine[engine]}

    def forget(self, engine: str) -> None:
        """An engine that is there no more."""
        self._under_way.pop(engine, None)


def abort(requests: Sequence[InFlight]) -> None:
    """End requests on the engine that is at them. One that cannot be reached ends them by itself,
    or by their deadlines."""
    engine = EngineControl(EngineAddress(requests[0].engine, requests[0].url))
    try:
        engine.abort([request.request_id for request in requests], ABORT_SECONDS)
    except ControlError:
        return
