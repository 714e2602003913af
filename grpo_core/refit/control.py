"""The control routes of one engine, called synchronously: pause, update, version, canary.

Every call has a deadline and raises ControlError with the engine's own words for anything but success. These
routes are not authenticated by vLLM, so engines listen on loopback or a private network.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import requests

from grpo_core.rollout.wire import parse_scores, score_request

HEALTH_SECONDS = 3.0

T = TypeVar("T")


class ControlError(RuntimeError):
    """A control call that did not succeed; after `start` the engine is then in an unknown state."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """An engine of the pool. A restarted engine is another engine: give it another name."""

    name: str
    url: str


class EngineControl:
    """The engine at an address. Stateless and safe to share between threads."""

    def __init__(self, address: EngineAddress, api_key: str | None = None) -> None:
        self.name = address.name
        self.url = address.url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def pause(self, mode: str, clear_cache: bool, deadline_seconds: float) -> None:
        """Stop sampling. Returns when no step is running; new requests queue until `resume`."""
        self._post(f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}", None, deadline_seconds)

    def resume(self, deadline_seconds: float) -> None:
        self._post("/resume", None, deadline_seconds)

    def init_transfer(self, info: dict[str, Any], deadline_seconds: float) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": info}, deadline_seconds)

    def start(self, deadline_seconds: float) -> None:
        self._post("/start_weight_update", None, deadline_seconds)

    def update(self, info: dict[str, Any], deadline_seconds: float) -> None:
        self._post("/update_weights", {"update_info": info}, deadline_seconds)

    def finish(self, stamp: str, deadline_seconds: float) -> None:
        self._post("/finish_weight_update", {"weight_version": stamp}, deadline_seconds)

    def weight_stamp(self, deadline_seconds: float) -> str:
        """The stamp the engine samples with; `default` when it was never refitted."""
        return str(self._get("/weight_info", deadline_seconds)["weight_version"])

    def world_size(self, deadline_seconds: float) -> int:
        """Workers of the engine: tensor, pipeline and data parallel."""
        return int(self._get("/get_world_size", deadline_seconds)["world_size"])

    def score(self, token_ids: list[int], cache_salt: str, deadline_seconds: float) -> list[float]:
        """Log-probs (nats) of `token_ids[1:]`, each given the tokens before it. Waits while the engine is paused."""
        answer = self._post("/inference/v1/generate", score_request(token_ids, cache_salt), deadline_seconds)
        return parse_scores(answer, token_ids)

    def is_healthy(self) -> bool:
        """Whether the engine answers; a dead one may keep its process but not its port."""
        try:
            return requests.get(self.url + "/health", timeout=HEALTH_SECONDS).status_code == 200
        except requests.RequestException:
            return False

    def _get(self, path: str, deadline_seconds: float) -> dict[str, Any]:
        return self._call("GET", path, None, deadline_seconds)

    def _post(self, path: str, body: dict[str, Any] | None, deadline_seconds: float) -> dict[str, Any]:
        return self._call("POST", path, body, deadline_seconds)

    def _call(self, method: str, path: str, body: dict[str, Any] | None, deadline_seconds: float) -> dict[str, Any]:
        try:
            answer = requests.request(
                method, self.url + path, json=body, headers=self._headers, timeout=deadline_seconds
            )
        except requests.RequestException as error:
            raise ControlError(f"engine {self.name}: {method} {path} got no answer: {error}") from error
        if answer.status_code != 200:
            raise ControlError(
                f"engine {self.name}: {method} {path} answered {answer.status_code}: {answer.text[:500]}"
            )
        try:
            parsed = answer.json()
        except ValueError as error:
            raise ControlError(
                f"engine {self.name}: {method} {path} answered no JSON: {answer.text[:100]!r}"
            ) from error
        if not isinstance(parsed, dict):
            raise ControlError(f"engine {self.name}: {method} {path} answered {answer.text[:100]!r}, not an object")
        return parsed


def call_in_background(call: Callable[[], T]) -> Future[T]:
    """Run `call` in a daemon thread, which can never keep the process alive. Its outcome is in the future."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the future
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
