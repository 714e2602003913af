"""Environments behind a URL: the client, and the contract of the server. All requests are POST with a JSON object.

    /reset   {"episode", "previous", "columns", "seed"}  → {"messages": [...], "tools": [...]}
    /step    {"episode", "number", "answer"}             → {"messages": [...], "done": bool}
    /reward  {"episode"}                                 → {"reward": number or null}
    /close   {"episode"}                                 → {}

`episode` is chosen by the client and new for every reset; `previous` is its last one, or null, and is over. `number`
counts the steps of an episode from 0. A request may come twice, because the answer to the first was lost: the server
then answers as before and does nothing again. An episode is over with /close or the next /reset of its client; one
whose client was killed hears of neither, so a server should end episodes that have long been silent.
Status 408, 429 and 5xx, a lost connection and silence are tried again with growing pauses, all within one deadline;
any other status but 200 is final.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Mapping
from typing import Any

import aiohttp

from grpo_core.rollout.chat import Message
from grpo_core.rollout.environments import Opening, Step

FIRST_PAUSE_SECONDS = 0.25
# Left for the call around a request, so that its error names the request and not the deadline.
MARGIN = 0.95
# No answer, too slow a request, too many requests.
TRIED_AGAIN = (0, 408, 429)


class HttpEnvironmentError(RuntimeError):
    """The server refused, failed or did not answer in time."""


class HttpClient:
    """One episode at a time at the server. `timeout_seconds` is for a request with all its attempts."""

    def __init__(self, url: str, *, attempts: int, timeout_seconds: float) -> None:
        self._url = url.rstrip("/")
        self._attempts = attempts
        self._timeout_seconds = timeout_seconds * MARGIN
        self._episode: str | None = None
        self._number = 0

    async def reset(self, columns: Mapping[str, Any], seed: int) -> Opening:
        previous, self._episode, self._number = self._episode, uuid.uuid4().hex, 0
        said = await self._post("/reset", {"previous": previous, "columns": dict(columns), "seed": seed})
        return Opening(_listed(said, "messages"), _listed(said, "tools"))

    async def step(self, answer: Message) -> Step:
        said = await self._post("/step", {"number": self._number, "answer": answer})
        self._number += 1
        return Step(_listed(said, "messages"), said.get("done", False))

    async def reward(self) -> float | None:
        said = await self._post("/reward", {})
        if "reward" not in said:
            raise HttpEnvironmentError(f"/reward answered {said!r:.100} without a reward; answer a number or null")
        reward: float | None = said["reward"]
        return reward

    async def close(self) -> None:
        if self._episode is not None:
            await self._post("/close", {})
            self._episode = None

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        deadline = time.monotonic() + self._timeout_seconds
        payload = json.dumps({"episode": self._episode, **body}, default=str)
        pause = FIRST_PAUSE_SECONDS
        for attempt in range(1, self._attempts + 1):
            # The last attempt has all the time that is left; an earlier one leaves some for those after it.
            left = deadline - time.monotonic()
            status, text = await self._attempt(path, payload, left / (self._attempts - attempt + 1))
            if status == 200:
                return _object(path, text)
            again = status in TRIED_AGAIN or status >= 500
            if not again or attempt == self._attempts or time.monotonic() + pause >= deadline:
                break
            await asyncio.sleep(pause)
            pause *= 2
        raise HttpEnvironmentError(
            f"POST {self._url}{path} failed {attempt} times, the last with {status or 'no answer'}: {text[:300]}"
        )

    async def _attempt(self, path: str, payload: str, seconds: float) -> tuple[int, str]:
        """Status and body; status 0 where there was no answer."""
        try:
            # A session of its own, because the next call may come on another event loop.
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=max(seconds, 0.001))) as session:
                headers = {"Content-Type": "application/json"}
                async with session.post(self._url + path, data=payload, headers=headers) as response:
                    return response.status, await response.text()
        except TimeoutError:
            return 0, f"silence for {seconds:.3g} s"
        except (aiohttp.ClientError, OSError) as error:
            return 0, repr(error)


def _object(path: str, text: str) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError as error:
        raise HttpEnvironmentError(f"{path} answered {text[:100]!r}, which is not JSON") from error
    if not isinstance(answer, dict):
        raise HttpEnvironmentError(f"{path} answered {text[:100]!r}, which is not an object")
    return answer


def _listed(said: Mapping[str, Any], name: str) -> Any:
    """What the answer has under a name that may be missing or null.
    What it must be is checked with every environment's."""
    value = said.get(name)
    return tuple(value or ()) if value is None or isinstance(value, list) else value
