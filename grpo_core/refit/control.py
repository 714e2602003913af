"""The control routes of one engine, called synchronously: pause, update, version, canary.

Every call has a deadline and raises ControlError with the engine's own words for anything but success. These
routes are not authenticated by vLLM, so engines listen on loopback or a private network.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import requests

from grpo_core.rollout.wire import (
    API_KEY_VARIABLE,
    REQUEST_PREFIX,
    next_token_request,
    parse_next_token,
    parse_scores,
    score_request,
)

HEALTH_SECONDS = 3.0

# A gauge whose labels are lists of names and whose value is the time; one sample stays for every list there was.
_ADAPTERS = re.compile(
    r'^vllm:lora_requests_info\{.*?running_lora_adapters="([^"]*)",waiting_lora_adapters="([^"]*)"\}\s+(\S+)$',
    re.MULTILINE,
)

T = TypeVar("T")


class ControlError(RuntimeError):
    """A control call that did not succeed; after `start` the engine is then in an unknown state."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """An engine of the pool. A restarted engine is another engine: give it another name."""

    name: str
    url: str


class EngineControl:
    """The engine at an address. Stateless and safe to share between threads.

    The key of its generation routes is that of the environment, so that it never enters a record of the run.
    """

    def __init__(self, address: EngineAddress) -> None:
        self.name = address.name
        self.url = address.url.rstrip("/")
        api_key = os.environ.get(API_KEY_VARIABLE)
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
        return self._said("/weight_info", "weight_version", str, deadline_seconds)

    def world_size(self, deadline_seconds: float) -> int:
        """Workers of the engine: tensor, pipeline and data parallel."""
        return self._said("/get_world_size", "world_size", int, deadline_seconds)

    def score(self, token_ids: list[int], cache_salt: str, deadline_seconds: float) -> list[float]:
        """Log-probs (nats) of `token_ids[1:]`, each given the tokens before it. Waits while the engine is paused."""
        body = score_request(token_ids, cache_salt)
        return parse_scores(self._post("/inference/v1/generate", body, deadline_seconds), token_ids)

    def score_last(self, token_ids: list[int], cache_salt: str, deadline_seconds: float, *, model: str) -> float:
        """Log-prob (nats) of the last of `token_ids` given those before it, by the adapter `model`; of two at least."""
        body = next_token_request(token_ids, cache_salt, model=model)
        return parse_next_token(self._post("/inference/v1/generate", body, deadline_seconds), token_ids[-1])

    def call_workers(self, method: str, deadline_seconds: float) -> list[Any]:
        """What each worker answers to a method of its class, in order of rank."""
        answer = self._post("/collective_rpc", {"method": method, "timeout": deadline_seconds}, deadline_seconds)
        results = answer.get("results")
        if not isinstance(results, list):
            raise ControlError(f"engine {self.name}: /collective_rpc {method} answered {str(answer)[:100]!r}")
        return results

    def load_adapter(self, name: str, path: str, deadline_seconds: float) -> None:
        """Load a LoRA adapter from a directory that the engine sees. Requests name it as their model."""
        self._call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, deadline_seconds)

    def unload_adapter(self, name: str, deadline_seconds: float) -> None:
        self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, deadline_seconds)

    def adapters(self, deadline_seconds: float) -> list[str]:
        """The loaded LoRA adapters."""
        models = self._said("/v1/models", "data", list, deadline_seconds)
        try:
            return [str(model["id"]) for model in models if model.get("parent") is not None]
        except (KeyError, TypeError, AttributeError) as error:
            raise ControlError(f"engine {self.name}: GET /v1/models answered {str(models)[:100]!r}") from error

    def adapters_in_use(self, deadline_seconds: float) -> frozenset[str]:
        """The LoRA adapters that some request, running or waiting, names."""
        text = self._call("GET", "/metrics", None, deadline_seconds)
        return parse_adapters_in_use(text)

    def abort(self, request_ids: list[str], deadline_seconds: float) -> None:
        """End requests; those that have ended already are no error. Their callers hear that they were aborted."""
        self._post(
            "/abort_requests", {"request_ids": [REQUEST_PREFIX + name for name in request_ids]}, deadline_seconds
        )

    def is_healthy(self) -> bool:
        """Whether the engine answers; a dead one may keep its process but not its port."""
        try:
            return requests.get(self.url + "/health", timeout=HEALTH_SECONDS).status_code == 200
        except requests.RequestException:
            return False

    def _said(self, path: str, key: str, kind: type[T], deadline_seconds: float) -> T:
        """One value of the answer to a GET."""
        answer = self._object("GET", path, None, deadline_seconds)
        value = answer.get(key)
        if not isinstance(value, kind):
            raise ControlError(f"engine {self.name}: GET {path} answered {str(answer)[:100]!r}, without a {key}")
        return value

    def _post(self, path: str, body: dict[str, Any] | None, deadline_seconds: float) -> dict[str, Any]:
        return self._object("POST", path, body, deadline_seconds)

    def _object(self, method: str, path: str, body: dict[str, Any] | None, deadline_seconds: float) -> dict[str, Any]:
        text = self._call(method, path, body, deadline_seconds)
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ControlError(f"engine {self.name}: {method} {path} answered no JSON: {text[:100]!r}") from error
        if not isinstance(parsed, dict):
            raise ControlError(f"engine {self.name}: {method} {path} answered {text[:100]!r}, not an object")
        return parsed

    def _call(self, method: str, path: str, body: dict[str, Any] | None, deadline_seconds: float) -> str:
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
        return answer.text


def parse_adapters_in_use(exposition: str) -> frozenset[str]:
    """The adapters that the newest sample of vLLM's `lora_requests_info` names; its value is when it was written."""
    samples = []
    for match in _ADAPTERS.finditer(exposition):
        with suppress(ValueError):
            samples.append((float(match[3]), f"{match[1]},{match[2]}"))
    newest = max(samples, default=(0.0, ""))[1]
    return frozenset(name for name in newest.split(",") if name)
