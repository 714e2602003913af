"""A scriptable stand-in for one vLLM engine, for fault injection: the HTTP contract we use, without a model.

Tokens and log-probs are a function of the seed, so a retry on another fake engine gives the same answer. Each
token carries the stamp the engine has when it is sampled; while paused, requests queue or stand still. Faults
are scripted: each is used up by the next matching calls.

    with FakeEngine() as engine:
        engine.faults.append(Fault("/update_weights", "status", status=500))
"""

from __future__ import annotations

import asyncio
import heapq
import json
import math
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from aiohttp import web

GENERATE = "/inference/v1/generate"


@dataclass
class Fault:
    """What goes wrong on `path`, `times` times.

    delay: answer after `seconds`. status: answer `status`. reset: break the connection. hang: never answer.
    die: the whole engine is gone, `seconds` after the call came. null_logprob, nan_logprob, clamped_logprob (-9999,
    what vLLM sends for NaN), missing_logprob, wrong_version (stamp `version`), missing_span, empty: a generation whose
    first choice looks well and is not. garbage: answer `text`.
    """

    path: str
    kind: Literal[
        "delay",
        "status",
        "reset",
        "hang",
        "die",
        "null_logprob",
        "nan_logprob",
        "clamped_logprob",
        "missing_logprob",
        "wrong_version",
        "missing_span",
        "empty",
        "garbage",
    ]
    times: int = 1
    seconds: float = 0.0
    status: int = 500
    version: str = "default"
    text: str = ""


def server_info(
    dtype: str = "bfloat16", max_model_len: int = 1 << 20, transfer: str = "gloo", **model: Any
) -> dict[str, Any]:
    """How an engine says that it was started: here as the defaults of a run need it."""
    return {
        "vllm_config": {
            "model_config": {
                "dtype": f"torch.{dtype}",
                "max_model_len": max_model_len,
                "logprobs_mode": "processed_logprobs",
                **model,
            },
            "weight_transfer_config": {"backend": transfer},
            "lora_config": None,
        }
    }


@dataclass
class Places:
    """The sequences that an engine runs at once, None without a limit. The others wait in their order, or in that of
    their priorities first, of which less is sooner."""

    most: int | None
    by_priority: bool
    taken: int = 0
    waiting: list[tuple[int, int, asyncio.Future[None]]] = field(default_factory=list)
    asked: int = 0

    @asynccontextmanager
    async def one(self, priority: int) -> AsyncIterator[None]:
        """A place, when it is there."""
        if self.most is not None and self.taken >= self.most:
            turn = asyncio.get_running_loop().create_future()
            self.asked += 1
            heapq.heappush(self.waiting, (priority if self.by_priority else 0, self.asked, turn))
            await turn
        else:
            self.taken += 1
        try:
            yield
        finally:
            if self.waiting:
                heapq.heappop(self.waiting)[2].set_result(None)
            else:
                self.taken -= 1


@dataclass
class FakeEngine:
    """One engine on a free port of loopback, on its own thread. `calls` lists the paths in order of arrival.

    `staged` is what its worker answers about fetching weights from a store; `adapters` are those loaded, by name;
    `configuration` is what it says about how it was started.
    """

    vocabulary_size: int = 128
    seconds_per_token: float = 0.0
    max_num_seqs: int | None = None
    by_priority: bool = True
    stop_token_ids: tuple[int, ...] = ()
    workers: int = 1
    version: str = "default"
    score: Callable[[list[int]], list[float]] | None = None
    script: Callable[[list[int], int], list[int]] | None = None
    staged: dict[str, Any] = field(default_factory=dict)
    preemptions: int = 0
    kv_usage: float = 0.25
    adapters: dict[str, str] = field(default_factory=dict)
    configuration: dict[str, Any] = field(default_factory=lambda: server_info())
    faults: list[Fault] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    url: str = ""

    def __enter__(self) -> Self:
        self._ready = threading.Event()
        self._aborted: set[str] = set()
        self._generated = 0
        self._running = 0
        self._named: Counter[str | None] = Counter()
        self._places = Places(self.max_num_seqs, self.by_priority)
        self._updating = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        if not self._ready.wait(30):
            raise RuntimeError("the fake engine did not start within 30 s")
        return self

    def __exit__(self, *exc: object) -> None:
        self.die()
        self._thread.join(timeout=10)

    def die(self) -> None:
        """Close the port and break every connection, as a killed process does."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stopped.set)

    def restart(self) -> None:
        """Be as a process that was started again at the same address: with its first weights, and nothing in flight."""
        self.version = "default"
        self.adapters.clear()
        self._updating = False
        self._loop.call_soon_threadsafe(self._resumed.set)
        self._loop.call_soon_threadsafe(self._admitting.set)

    @property
    def is_paused(self) -> bool:
        return not self._resumed.is_set()

    def _serve(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._admitting = asyncio.Event()
        self._admitting.set()
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.0, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._server = runner
        self._ready.set()
        await self._stopped.wait()
        for connection in list(runner.server.connections) if runner.server else []:
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        body = await request.json() if request.can_read_body else {}
        self.calls.append(path)
        self.bodies.append((path, {**request.query, **body}))
        fault = self._fault(path)
        if fault is not None:
            if fault.kind == "delay":
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopped.wait(), fault.seconds)
            elif fault.kind == "status":
                return _error(fault.status, "scripted")
            elif fault.kind == "garbage":
                return web.Response(text=fault.text, content_type="application/json")
            elif fault.kind == "hang":
                await self._stopped.wait()
                return web.Response()
            elif fault.kind in ("reset", "die"):
                if fault.kind == "die" and fault.seconds:
                    self._loop.call_later(fault.seconds, self._stopped.set)
                    return await self._respond(path, request, body, None)
                if fault.kind == "die":
                    self._stopped.set()
                if request.transport is not None:
                    request.transport.abort()
                return web.Response()
        return await self._respond(path, request, body, fault)

    async def _respond(
        self, path: str, request: web.Request, body: dict[str, Any], fault: Fault | None
    ) -> web.StreamResponse:
        if path == "/pause" and request.query.get("mode") == "wait":
            self._admitting.clear()
            while self._running:
                await asyncio.sleep(0.005)
        if path != GENERATE:
            return self._control(path, request, body)
        await self._admitting.wait()
        if body.get("model") not in (None, "policy", *self.adapters):
            return _error(404, f"The model `{body['model']}` does not exist.")
        return _json(_spoil(await self._generate(body), fault))

    def _fault(self, path: str) -> Fault | None:
        for fault in self.faults:
            if fault.path == path and fault.times > 0:
                fault.times -= 1
                return fault
        return None

    def _control(self, path: str, request: web.Request, body: dict[str, Any]) -> web.Response:
        match path:
            case "/pause":
                if request.query.get("mode", "abort") not in ("abort", "wait", "keep"):
                    return _error(400, "bad mode")
                self._resumed.clear()
                return _json({"status": "paused"})
            case "/resume":
                self._resumed.set()
                self._admitting.set()
                return _json({"status": "resumed"})
            case "/start_weight_update":
                if self._updating:
                    return _error(500, "an update is already active")
                self._updating = True
                return _json({"message": "Weight update started"})
            case "/update_weights" | "/finish_weight_update" if not self._updating:
                return _error(500, "no update was started")
            case "/finish_weight_update":
                self._updating = False
                self.version = body.get("weight_version", self.version)
                return _json({"message": "Weight update finished"})
            case "/abort_requests":
                self._aborted |= set(body.get("request_ids", []))
                return _json({"status": "aborted", "aborted": len(body.get("request_ids", []))})
            case "/metrics":
                return web.Response(text=self._metrics())
            case "/v1/load_lora_adapter":
                if body["lora_name"] in self.adapters:
                    return _error(400, "already loaded")
                self.adapters[body["lora_name"]] = body["lora_path"]
                return web.Response(text="Success: LoRA adapter added successfully.")
            case "/v1/unload_lora_adapter":
                if self.adapters.pop(body["lora_name"], None) is None:
                    return _error(404, "not loaded")
                return web.Response(text="Success: LoRA adapter removed successfully.")
        answers: dict[str, dict[str, Any]] = {
            "/health": {},
            "/server_info": self.configuration,
            "/weight_info": {"weight_version": self.version},
            "/get_world_size": {"world_size": self.workers},
            "/is_paused": {"is_paused": self.is_paused},
            "/init_weight_transfer_engine": {"message": "Weight transfer initialized"},
            "/shutdown_weight_transfer_engine": {"message": "Weight transfer shut down"},
            "/update_weights": {"message": "Weights updated"},
            "/reset_prefix_cache": {"success": True},
            "/collective_rpc": {"results": [self.staged] * self.workers},
            "/v1/models": {
                "data": [
                    {"id": "policy", "parent": None},
                    *({"id": name, "parent": "policy"} for name in self.adapters),
                ]
            },
        }
        return _json(answers[path]) if path in answers else _error(404, "Not Found")

    async def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        sampling = body["sampling_params"]
        adapter = body.get("model") if body.get("model") in self.adapters else None
        request_id = f"generate-tokens-{body.get('request_id', random.randrange(1 << 30))}"
        self._running += 1
        self._named[adapter] += 1
        try:
            n = sampling.get("n", 1)
            scripts = [None if self.script is None else self.script(body["token_ids"], index) for index in range(n)]
            choices = await asyncio.gather(
                *(
                    self._choice(index, request_id, sampling, script, body.get("priority", 0))
                    for index, script in enumerate(scripts)
                )
            )
            if asked := sampling.get("logprob_token_ids"):
                ids = [*body["token_ids"], asked[0]]
                score = -math.log(self.vocabulary_size) if self.score is None else self.score(ids)[-1]
                for choice in choices:
                    for entry in choice["logprobs"]["content"]:
                        entry["top_logprobs"] = [{"token_id": asked[0], "logprob": score}]
        finally:
            self._running -= 1
            self._named[adapter] -= 1
        token_ids = body["token_ids"]
        return {
            "request_id": request_id,
            "model": adapter or "policy",
            "usage": {"prompt_tokens": len(token_ids)},
            "prompt_logprobs": self._prompt_logprobs(token_ids) if "prompt_logprobs" in sampling else None,
            "choices": choices,
        }

    async def _choice(
        self, index: int, request_id: str, sampling: dict[str, Any], script: list[int] | None, priority: int
    ) -> dict[str, Any]:
        async with self._places.one(priority):
            return await self._sampled(index, request_id, sampling, script)

    async def _sampled(
        self, index: int, request_id: str, sampling: dict[str, Any], script: list[int] | None
    ) -> dict[str, Any]:
        draw = random.Random(f"{sampling.get('seed')} {index}")
        ids: list[int] = []
        content: list[dict[str, Any]] = []
        spans: list[dict[str, Any]] = []
        reason = "length"
        stops = {*self.stop_token_ids, *sampling.get("stop_token_ids", [])}
        longest = sampling["max_tokens"] if script is None else min(sampling["max_tokens"], len(script))
        while len(ids) < longest:
            await self._resumed.wait()
            if self.seconds_per_token:
                await asyncio.sleep(self.seconds_per_token)
                await self._resumed.wait()
            if request_id in self._aborted:
                reason = "abort"
                break
            token = draw.randrange(self.vocabulary_size) if script is None else script[len(ids)]
            ids.append(token)
            content.append({"token_id": token, "logprob": -draw.uniform(0.05, 3.0), "rank": 1, "top_logprobs": []})
            if not spans or spans[-1]["version"] != self.version:
                spans.append({"version": self.version, "start": len(ids) - 1, "end": len(ids)})
            spans[-1]["end"] = len(ids)
            self._generated += 1
            if token in stops:
                reason = "stop"
                break
        return {
            "index": index,
            "finish_reason": reason,
            "stop_reason": None,
            "token_ids": ids,
            "weight_versions": spans,
            "logprobs": {"content": content} if "logprobs" in sampling else None,
        }

    def _prompt_logprobs(self, token_ids: list[int]) -> list[dict[str, Any] | None]:
        uniform = [-math.log(self.vocabulary_size)] * (len(token_ids) - 1)
        scores = uniform if self.score is None else self.score(token_ids)
        return [None, *({str(t): {"logprob": s, "rank": 1}} for t, s in zip(token_ids[1:], scores, strict=True))]

    def _metrics(self) -> str:
        label = '{engine="0",model_name="policy"}'
        return (
            "# HELP vllm:num_requests_running running\n"
            f"vllm:num_requests_running{label} {self._running}\n"
            f"vllm:num_requests_waiting{label} {len(self._places.waiting)}\n"
            f'vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} 7.0\n'
            f"vllm:kv_cache_usage_perc{label} {self.kv_usage}\n"
            f"vllm:generation_tokens_total{label} {self._generated}\n"
            f"vllm:num_preemptions_total{label} {self.preemptions}\n"
            f'vllm:lora_requests_info{{max_lora="4",running_lora_adapters="{self._in_use()}",waiting_lora_adapters=""}} 2.0\n'
            'vllm:lora_requests_info{max_lora="4",running_lora_adapters="0.0",waiting_lora_adapters="9.9"} 1.0\n'
        )

    def _in_use(self) -> str:
        return ",".join(name for name, requests in self._named.items() if name is not None and requests)


def _spoil(answer: dict[str, Any], fault: Fault | None) -> dict[str, Any]:
    """Damage the first choice as the fault says."""
    if fault is None:
        return answer
    choice = answer["choices"][0]
    values = {"null_logprob": None, "nan_logprob": math.nan, "clamped_logprob": -9999.0}
    if fault.kind in values:
        choice["logprobs"]["content"][-1]["logprob"] = values[fault.kind]
    elif fault.kind == "missing_logprob":
        choice["logprobs"]["content"].pop()
    elif fault.kind == "wrong_version":
        choice["weight_versions"] = [{"version": fault.version, "start": 0, "end": len(choice["token_ids"])}]
    elif fault.kind == "missing_span":
        choice["weight_versions"].pop()
    elif fault.kind == "empty":
        choice |= {"token_ids": [], "weight_versions": [], "logprobs": {"content": []}}
    return answer


def _json(answer: dict[str, Any]) -> web.Response:
    return web.Response(text=json.dumps(answer), content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    body = {"error": {"message": message, "type": "Error", "param": None, "code": status}}
    return web.Response(status=status, text=json.dumps(body), content_type="application/json")
