"""A small engine process for whole-system tests: the HTTP contract we use of vLLM, computed with the real tiny model.

    python tests/model_engine.py --model DIRECTORY --host 127.0.0.1 --port 8000 [any other flag of vLLM is ignored]

It reads a Qwen3 directory, takes refits over our own gloo protocol or from the run's store, loads LoRA adapters while
it runs, and scores canaries with the weights it holds, so the real trainer, flow and store run against it unchanged.
What it samples is a pure function of (weights, prompt, seed, number of siblings): a request is computed alone, its
siblings in one batch, and every sibling draws from a generator of its own. So with a window of 0 a whole run is
deterministic. It starts in the time that importing torch takes.

Faults come from the JSON file that MODEL_ENGINE_FAULTS names, read again at every request; each that kills or stalls is
removed from the file first, so that it happens once:

    die_at_request: 5         SIGKILL itself when this process gets its fifth request to generate
    die_in_update: 3          SIGKILL itself in the third weight update of this process, after its first tensor
    stall_in_update: 3        stand still for STALL_SECONDS there; the fault is removed when it begins
    die_in_load: 3            SIGKILL itself when this process is to load its third adapter
    late_after_update: 3      answer STALL_SECONDS late that the third weight update succeeded; removed when it begins
    seconds_per_token: 0.01   sample slowly
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from aiohttp import web
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from grpo_core.refit.digest import HEAD, TensorEntry, check_complete, check_digest, checkpoint_shapes
from grpo_core.refit.gloo import JOINED, READY, join_group
from grpo_core.refit.shelf import manifest_of, obtain
from grpo_core.refit.snapshot import read_tensors
from grpo_core.trajectory import Stamp
from storage.objects import ObjectStore
from tests.fake_engine import server_info

EMBEDDING = "model.embed_tokens.weight"
POLICY = "policy"
PEFT_PREFIX, B_FACTOR = "base_model.model.", ".lora_B.weight"
FAULTS = "MODEL_ENGINE_FAULTS"
STALL_SECONDS = 5.0


class Qwen3:
    """The forward pass of a Qwen3 in float32, from its configuration and its weights by name."""

    def __init__(self, directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        self.layers: int = config["num_hidden_layers"]
        self._heads: int = config["num_attention_heads"]
        self._kv_heads: int = config["num_key_value_heads"]
        self._head_size: int = config["head_dim"]
        self._eps: float = config["rms_norm_eps"]
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        exponents = torch.arange(0, self._head_size, 2, dtype=torch.float32) / self._head_size
        self._frequencies = 1.0 / theta**exponents
        self.weights: dict[str, Tensor] = {}
        for file in sorted(directory.glob("*.safetensors")):
            self.weights |= load_file(file)
        self.weights.setdefault(HEAD, self.weights[EMBEDDING])

    def adapted(self, directory: Path) -> Qwen3:
        """This model with an adapter in PEFT's format merged into the weights that it has now: W + alpha/rank · B A."""
        config = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
        factors = load_file(directory / "adapter_model.safetensors")
        model = copy.copy(self)
        model.weights = dict(self.weights)
        for name, b in factors.items():
            if name.endswith(B_FACTOR):
                layer = name.removeprefix(PEFT_PREFIX).removesuffix(B_FACTOR)
                a = factors[name.replace("lora_B", "lora_A")]
                change = config["lora_alpha"] / config["r"] * (b.float() @ a.float())
                model.weights[f"{layer}.weight"] = self.weights[f"{layer}.weight"] + change
        return model

    def logits(self, ids: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Logits [batch, tokens, vocabulary] of `ids` [batch, tokens] after what `cache` holds, which grows by them."""
        past = cache[0][0].shape[2] if cache else 0
        positions = torch.arange(past, past + ids.shape[1], dtype=torch.float32)
        angles = torch.outer(positions, self._frequencies).repeat(1, 2)
        visible = torch.arange(past + ids.shape[1]).unsqueeze(0) <= positions.unsqueeze(1)
        hidden = self.weights[EMBEDDING][ids]
        for layer in range(self.layers):
            hidden = self._layer(layer, hidden, angles, visible, cache)
        return self._norm(hidden, "model.norm") @ self.weights[HEAD].T

    def _layer(
        self, layer: int, hidden: Tensor, angles: Tensor, visible: Tensor, cache: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        name = f"model.layers.{layer}"
        x = self._norm(hidden, f"{name}.input_layernorm")
        query, key, value = (self._split(x, f"{name}.self_attn.{part}_proj") for part in "qkv")
        query = _rotated(self._norm(query, f"{name}.self_attn.q_norm"), angles)
        key = _rotated(self._norm(key, f"{name}.self_attn.k_norm"), angles)
        if layer < len(cache):
            key, value = torch.cat([cache[layer][0], key], 2), torch.cat([cache[layer][1], value], 2)
            cache[layer] = (key, value)
        else:
            cache.append((key, value))
        group = self._heads // self._kv_heads
        attended = F.scaled_dot_product_attention(
            query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1), attn_mask=visible
        )
        hidden = hidden + self._project(attended.transpose(1, 2).flatten(2), f"{name}.self_attn.o_proj")
        x = self._norm(hidden, f"{name}.post_attention_layernorm")
        gated = F.silu(self._project(x, f"{name}.mlp.gate_proj")) * self._project(x, f"{name}.mlp.up_proj")
        return hidden + self._project(gated, f"{name}.mlp.down_proj")

    def _split(self, x: Tensor, name: str) -> Tensor:
        return self._project(x, name).unflatten(-1, (-1, self._head_size)).transpose(1, 2)

    def _project(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return self.weights[f"{name}.weight"] * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps))


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()


@dataclass
class Sibling:
    """One continuation while it grows. A finished one stays in the batch, so that the others' sums do not change."""

    draw: random.Random
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    asked: list[list[dict[str, Any]]] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    reason: str | None = None

    def take(self, logits: Tensor, sampling: Mapping[str, Any], stamp: str) -> int:
        """Sample the next token; a finished sibling repeats its last one, unheard."""
        if self.reason is not None:
            return self.ids[-1]
        temperature = sampling["temperature"]
        logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
        if temperature == 0:
            token = int(logprobs.argmax())
        else:
            cumulative = logprobs.double().exp().cumsum(0)
            token = int(torch.searchsorted(cumulative, self.draw.random() * float(cumulative[-1]), right=True))
        self.ids.append(token)
        self.logprobs.append(float(logprobs[token]))
        wanted = dict.fromkeys([token, *sampling.get("logprob_token_ids", ())])
        self.asked.append([{"token_id": each, "logprob": float(logprobs[each])} for each in wanted])
        if not self.spans or self.spans[-1]["version"] != stamp:
            self.spans.append({"version": stamp, "start": len(self.ids) - 1, "end": 0})
        self.spans[-1]["end"] = len(self.ids)
        if token in sampling.get("stop_token_ids", ()):
            self.reason = "stop"
        elif len(self.ids) == sampling["max_tokens"]:
            self.reason = "length"
        return token

    def as_choice(self, index: int) -> dict[str, Any]:
        content = [
            {"token_id": token, "logprob": logprob, "top_logprobs": asked}
            for token, logprob, asked in zip(self.ids, self.logprobs, self.asked, strict=True)
        ]
        return {
            "index": index,
            "finish_reason": self.reason,
            "token_ids": self.ids,
            "weight_versions": self.spans,
            "logprobs": {"content": content},
        }


class Siblings:
    """The continuations of one prompt, which grow together in one batch, one token at a time."""

    def __init__(self, prompt: list[int], sampling: Mapping[str, Any]) -> None:
        self.members = [Sibling(random.Random(f"{sampling.get('seed')} {index}")) for index in range(sampling["n"])]
        self._prompt = prompt
        self._sampling = sampling
        self.forget()

    @property
    def finished(self) -> bool:
        return all(sibling.reason is not None for sibling in self.members)

    def forget(self) -> None:
        """Drop the keys and values of what was read so far; the next token computes them again."""
        self._cache: list[tuple[Tensor, Tensor]] = []
        self._new = torch.tensor([self._prompt + ids for ids in self._padded()])

    @torch.inference_mode()
    def grow(self, model: Qwen3, stamp: str) -> int:
        """Add one token to each; how many were not finished before."""
        unfinished = sum(sibling.reason is None for sibling in self.members)
        logits = model.logits(self._new, self._cache)[:, -1]
        tokens = [sibling.take(logits[i], self._sampling, stamp) for i, sibling in enumerate(self.members)]
        self._new = torch.tensor(tokens).unsqueeze(1)
        return unfinished

    def abort(self) -> None:
        for sibling in self.members:
            sibling.reason = sibling.reason or "abort"

    def _padded(self) -> list[list[int]]:
        """Their tokens, in which the finished ones are as long as the others, so that they make one batch."""
        longest = max(len(sibling.ids) for sibling in self.members)
        return [sibling.ids + sibling.ids[-1:] * (longest - len(sibling.ids)) for sibling in self.members]


class Engine:
    """The model, the weights' stamp, and who is running; one event loop computes everything but the transfer."""

    def __init__(self, directory: Path) -> None:
        self.model = Qwen3(directory)
        self._shapes = checkpoint_shapes(directory)
        self.stamp = "default"
        self.adapters: dict[str, Path] = {}
        self._adapted: dict[str, Qwen3] = {}
        self._named: Counter[str] = Counter()
        self.loads = 0
        self.received = 0
        self.updates = 0
        self.running = 0
        self.generated = 0
        self.caches = 0  # generation of the key-value caches: a higher one forgets all older
        self.standing = False  # running requests do not sample
        self.aborting = False
        self.resumed = asyncio.Event()  # new requests are taken in
        self.resumed.set()
        # Like a worker of vLLM, it does one thing at a time: who comes while an update hangs, waits for its end.
        self.worker = ThreadPoolExecutor(max_workers=1)
        self._store: TCPStore | None = None
        self._group: Any = None
        self._staged: tuple[str, Path] | None = None

    async def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        await self.resumed.wait()
        self.received += 1
        if self.received == _faults().get("die_at_request"):
            _die("die_at_request")
        name = body.get("model", POLICY)
        self.running += 1
        self._named[name] += 1
        try:
            answer = await self._generate(name, body["token_ids"], body["sampling_params"])
            return {**answer, "model": name}
        finally:
            self.running -= 1
            self._named[name] -= 1

    def knows(self, name: str) -> bool:
        """Whether a request may name this model."""
        return name == POLICY or name in self.adapters

    def in_use(self) -> str:
        return ",".join(name for name, requests in self._named.items() if requests and name != POLICY)

    def load_adapter(self, name: str, directory: Path) -> None:
        """Have an adapter in memory, as the base is now; blocks."""
        self.loads += 1
        if self.loads == _faults().get("die_in_load"):
            _die("die_in_load")
        self._adapted[name] = self.model.adapted(directory)
        self.adapters[name] = directory

    def unload_adapter(self, name: str) -> None:
        del self.adapters[name], self._adapted[name]

    def _take(self, weights: dict[str, Tensor]) -> None:
        """These are the weights now, also under the adapters."""
        self.model.weights = weights
        self._adapted = {name: self.model.adapted(directory) for name, directory in self.adapters.items()}

    def _model(self, name: str) -> Qwen3:
        return self.model if name == POLICY else self._adapted[name]

    async def _generate(self, name: str, prompt: list[int], sampling: Mapping[str, Any]) -> dict[str, Any]:
        scores = self._scores(prompt) if "prompt_logprobs" in sampling else None
        pause = _faults().get("seconds_per_token", 0.0)
        siblings, generation = Siblings(prompt, sampling), self.caches
        while not siblings.finished:
            if generation != self.caches:
                siblings.forget()
                generation = self.caches
            self.generated += siblings.grow(self._model(name), self.stamp)
            await asyncio.sleep(pause)
            while self.standing:
                await asyncio.sleep(0.002)
            if self.aborting:
                siblings.abort()
        return {
            "prompt_logprobs": scores,
            "choices": [sibling.as_choice(index) for index, sibling in enumerate(siblings.members)],
        }

    @torch.inference_mode()
    def _scores(self, prompt: list[int]) -> list[dict[str, Any] | None]:
        logprobs = torch.log_softmax(self.model.logits(torch.tensor([prompt]), [])[0], dim=-1)
        return [None, *({str(t): {"logprob": float(logprobs[i, t])}} for i, t in enumerate(prompt[1:]))]

    async def pause(self, mode: str, clear_cache: bool) -> None:
        self.resumed.clear()
        self.standing, self.aborting = mode == "keep", mode == "abort"
        while mode != "keep" and self.running:
            await asyncio.sleep(0.002)
        self.caches += clear_cache

    def resume(self) -> None:
        self.standing = self.aborting = False
        self.resumed.set()

    def join(self, info: Mapping[str, Any]) -> None:
        """Meet the trainer; blocks."""
        timeout = timedelta(seconds=info["timeout_seconds"])
        self._store = TCPStore(info["host"], info["port"], is_master=False, timeout=timeout)
        self._store.set(f"{JOINED}/1", "1")
        self._group = join_group(PrefixStore("group", self._store), 1, info["world_size"], info["host"], timeout)

    def fetch(self, info: Mapping[str, Any]) -> None:
        """Have a version of the store on this host; blocks."""
        store = ObjectStore.open(info["url"], info["options"], client=info["client"], read_only=True)
        file = obtain(store, Stamp.parse(info["stamp"]), Path(info["shelf"]), deadline_seconds=info["timeout_seconds"])
        check_complete(manifest_of(file), self._shapes)
        self._staged = (info["stamp"], file)

    def staged(self) -> dict[str, Any]:
        return {"stamp": "" if self._staged is None else self._staged[0], "done": True, "error": None}

    def update(self, info: Mapping[str, Any]) -> None:
        """Receive all weights, check them, then take them; blocks."""
        if "stamp" in info:
            assert self._staged is not None and self._staged[0] == info["stamp"]
            self.updates += 1
            self._fail_or_stall()
            self._take({name: tensor.float() for name, tensor in read_tensors(self._staged[1]).items()})
            return
        manifest = [TensorEntry.from_json(entry) for entry in info["manifest"]]
        check_complete(manifest, self._shapes)
        assert self._store is not None
        self._store.set(f"{READY}/{info['number']}/1", "1")
        timeout = timedelta(seconds=info["timeout_seconds"])
        self.updates += 1
        received: dict[str, Tensor] = {}
        for entry in manifest:
            tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            self._group.broadcast(tensor.reshape(-1).view(torch.uint8), root=0, timeout=timeout).wait(timeout)
            received[entry.name] = tensor
            self._fail_or_stall()
        for entry in manifest:
            check_digest(entry, received[entry.name])
        self._take({name: tensor.float() for name, tensor in received.items()})

    def _fail_or_stall(self) -> None:
        if self.updates == _faults().get("die_in_update"):
            _die("die_in_update")
        if self.updates == _faults().get("stall_in_update"):
            _forget("stall_in_update")
            time.sleep(STALL_SECONDS)


def _faults() -> dict[str, Any]:
    path = os.environ.get(FAULTS)
    if not path or not Path(path).exists():
        return {}
    return json.loads(Path(path).read_text(encoding="utf-8"))


def _forget(fault: str) -> None:
    """Take a fault out of the file, so that it happens once."""
    path, left = Path(os.environ[FAULTS]), {name: value for name, value in _faults().items() if name != fault}
    # Whole at any moment, for whoever waits for the fault reads it too.
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps(left), encoding="utf-8")
    unfinished.replace(path)


def _die(fault: str) -> None:
    _forget(fault)
    os.kill(os.getpid(), signal.SIGKILL)


async def handle(engine: Engine, request: web.Request) -> web.Response:
    """One request of the HTTP contract."""
    loop = asyncio.get_running_loop()
    body = await request.json() if request.can_read_body else {}
    answer: dict[str, Any] = {}
    match request.path:
        case "/health":
            pass
        case "/weight_info":
            answer = {"weight_version": engine.stamp}
        case "/get_world_size":
            answer = {"world_size": 1}
        case "/metrics":
            labels = f'max_lora="4",running_lora_adapters="{engine.in_use()}",waiting_lora_adapters=""'
            return web.Response(
                text=f"vllm:num_requests_running {engine.running}\nvllm:generation_tokens_total {engine.generated}\n"
                f"vllm:lora_requests_info{{{labels}}} {time.time()}\n"
            )
        case "/v1/models":
            answer = {"data": [{"id": POLICY, "parent": None}, *({"id": n, "parent": POLICY} for n in engine.adapters)]}
        case "/v1/load_lora_adapter" if body["lora_name"] not in engine.adapters:
            path = Path(body["lora_path"])
            await loop.run_in_executor(engine.worker, engine.load_adapter, body["lora_name"], path)
        case "/v1/unload_lora_adapter" if body["lora_name"] in engine.adapters:
            engine.unload_adapter(body["lora_name"])
        case "/inference/v1/generate" if engine.knows(body.get("model", POLICY)):
            answer = await engine.generate(body)
        case "/pause":
            await engine.pause(request.query["mode"], request.query["clear_cache"] == "true")
        case "/resume":
            engine.resume()
        case "/init_weight_transfer_engine":
            info = body["init_info"]
            await loop.run_in_executor(engine.worker, engine.fetch if "stamp" in info else engine.join, info)
        case "/collective_rpc":
            answer = {"results": [engine.staged()]}
        case "/start_weight_update":
            pass
        case "/update_weights":
            await loop.run_in_executor(engine.worker, engine.update, body["update_info"])
            if engine.updates == _faults().get("late_after_update"):
                _forget("late_after_update")
                await asyncio.sleep(STALL_SECONDS)
        case "/finish_weight_update":
            engine.stamp = body["weight_version"]
        case _:
            return web.json_response({"error": f"{request.path} is not part of the contract"}, status=404)
    return web.json_response(answer)


async def serve(arguments: argparse.Namespace) -> None:
    engine = Engine(arguments.model)
    transfer = json.loads(arguments.weight_transfer_config)["backend"]
    started = server_info(arguments.dtype, arguments.max_model_len, transfer, logprobs_mode=arguments.logprobs_mode)
    started["vllm_config"]["lora_config"] = {"max_lora_rank": arguments.max_lora_rank}
    app = web.Application(client_max_size=1 << 28)

    async def route(request: web.Request) -> web.Response:
        return web.json_response(started) if request.path == "/server_info" else await handle(engine, request)

    app.router.add_route("*", "/{path:.*}", route)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, arguments.host, arguments.port).start()
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-model-len", type=int, default=1 << 20)
    parser.add_argument("--weight-transfer-config", default='{"backend": "gloo"}')
    parser.add_argument("--logprobs-mode", default="processed_logprobs")
    parser.add_argument("--max-lora-rank", type=int, default=0)
    arguments, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    asyncio.run(serve(arguments))


if __name__ == "__main__":
    main()
