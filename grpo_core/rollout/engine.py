"""The asynchronous client of one engine, and how its load is read.

A turn that leaves this module is complete and believable: one finite log-prob per token and version spans
that cover every token (`rollout.wire` checks it). Errors say what to do next: `EngineRejected` is a bug of
ours and never retried, `EngineUnavailable` is retried on another engine, `InvalidGeneration` is discarded;
whatever an engine answers, nothing else is raised. Every call has a deadline; cancelling one closes its
connection, which makes the engine drop the request.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp

from grpo_core.rollout.wire import (
    API_KEY_VARIABLE,
    InvalidGeneration,
    SamplingSettings,
    generate_request,
    parse_turns,
)
from grpo_core.trajectory import Turn

__all__ = ["EngineClient", "EngineRejected", "EngineUnavailable", "InvalidGeneration"]

# What is read from /metrics, by our names.
METRICS = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_usage": "vllm:kv_cache_usage_perc",
    "generation_tokens": "vllm:generation_tokens_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
}
_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{.*\})?\s+(\S+)")


class EngineRejected(RuntimeError):
    """The engine refused the request (4xx): another engine would refuse it too."""


class EngineUnavailable(RuntimeError):
    """The engine failed, was lost or did not answer in time: another engine may do."""


class EngineClient:
    """The engine at `url`. `name` goes into turns and messages. The session is shared and not closed here. The
    key of the environment is sent.

    `kept_caches`: the engine keeps its caches across refits, so a turn that began under another version than its salt
    is refused. `adapters`: the policy is the adapter that is named like the salt (`refit.adapters`).

    The session must allow as many connections as requests are to be in flight: an engine batches only what has
    reached it (aiohttp's default connector stops at 100).
    """

    def __init__(
        self,
        url: str,
        *,
        session: aiohttp.ClientSession,
        name: str = "",
        kept_caches: bool = False,
        adapters: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.url = url.rstrip("/")
        self.name = name or self.url
        self._session = session
        self._clock = clock
        self._kept_caches = kept_caches
        self._adapters = adapters
        api_key = os.environ.get(API_KEY_VARIABLE)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def generate_many(
        self,
        prompt_ids: Sequence[int],
        n: int,
        *,
        request_id: str,
        sampling: SamplingSettings,
        max_tokens: int,
        seed: int,
        stop_token_ids: Sequence[int],
        cache_salt: str,
        deadline_seconds: float,
    ) -> list[Turn | InvalidGeneration]:
        """`n` continuations of one prompt by one request: the prompt is read once, the answers come together. In the
        place of one that cannot be believed stands why.

        The engine derives a different seed for each choice from `seed`.
        """
        adapter = cache_salt if self._adapters else None
        body = generate_request(
            prompt_ids,
            request_id=request_id,
            sampling=sampling,
            max_tokens=max_tokens,
            seed=seed,
            stop_token_ids=stop_token_ids,
            cache_salt=cache_salt,
            n=n,
            model=adapter,
        )
        submitted_at = self._clock()
        answer = await self._post("/inference/v1/generate", body, deadline_seconds)
        return parse_turns(
            answer,
            prompt_ids,
            n,
            engine=self.name,
            submitted_at=submitted_at,
            finished_at=self._clock(),
            seed=seed,
            adapter=adapter,
            salt=cache_salt if self._kept_caches else None,
        )

    async def _post(self, path: str, body: Mapping[str, Any], deadline_seconds: float) -> dict[str, Any]:
        text = await self._text(path, body, deadline_seconds)
        try:
            # Python's JSON reads NaN and Infinity as such, so that the checks of `wire` see and name them.
            answer = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidGeneration("json", f"engine {self.name}: {path} answered no JSON: {text[:100]!r}") from error
        if not isinstance(answer, dict):
            raise InvalidGeneration("json", f"engine {self.name}: {path} answered {text[:100]!r}, not an object")
        return answer

    async def _text(self, path: str, body: Mapping[str, Any], deadline_seconds: float) -> str:
        try:
            async with self._session.post(
                self.url + path,
                json=body,
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=deadline_seconds),
            ) as response:
                # What is no UTF-8 is no JSON either, and is named as that.
                text = (await response.read()).decode(errors="replace")
                status = response.status
        except TimeoutError as error:
            raise EngineUnavailable(
                f"engine {self.name}: POST {path} got no answer within {deadline_seconds:g} s"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"engine {self.name}: POST {path} lost its connection: {error!r}") from error
        if status == 404 and self._adapters:
            # It was started again since it was given the adapter; whoever looks after it will notice.
            raise EngineUnavailable(f"engine {self.name} has no such route or adapter for POST {path}: {text[:500]}")
        if 400 <= status < 500:
            raise EngineRejected(f"engine {self.name} rejected POST {path} with {status}: {text[:500]}")
        if status != 200:
            raise EngineUnavailable(f"engine {self.name}: POST {path} answered {status}: {text[:500]}")
        return text


def parse_metrics(text: str) -> dict[str, float]:
    """The METRICS of a Prometheus exposition, summed over labels. A value that is no finite number is not reported."""
    names = {theirs: ours for ours, theirs in METRICS.items()}
    totals: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None or match[1] not in names:
            continue
        try:
            value = float(match[2])
        except ValueError:
            continue
        if math.isfinite(value):
            ours = names[match[1]]
            totals[ours] = totals.get(ours, 0.0) + value
    return totals
