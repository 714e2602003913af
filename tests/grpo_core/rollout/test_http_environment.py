"""An environment behind a URL: lost answers are asked for again, refusals are not, and silence ends at the deadline."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from grpo_core.config import HttpEnvironment
from grpo_core.rollout.environments import Opening, Step
from grpo_core.rollout.episodes import EnvironmentFailed, Episode, open_episodes
from grpo_core.rollout.http_environment import HttpClient, HttpEnvironmentError

ANSWER = {"role": "assistant", "content": "x"}


class Server:
    """Answers as the contract says; `faults` come first, each for one request."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.faults: list[str] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append((request.path, body))
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "silence":
            await asyncio.sleep(30)
        elif fault == "reset":
            assert request.transport is not None
            request.transport.abort()
        elif fault.isdigit():
            return web.Response(status=int(fault), text="scripted")
        elif fault:
            return web.Response(text=fault)
        answers: dict[str, dict[str, Any]] = {
            "/reset": {"messages": [{"role": "user", "content": f"seed {body.get('seed')}"}]},
            "/step": {"messages": [{"role": "user", "content": "more"}], "done": body.get("number") == 1},
            "/reward": {"reward": 0.5},
            "/close": {},
        }
        return web.json_response(answers[request.path])

    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    served = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", served.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.0, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield served
    await runner.cleanup()


def client(server: Server, *, attempts: int = 3, seconds: float = 3) -> HttpClient:
    return HttpClient(server.url, attempts=attempts, timeout_seconds=seconds)


async def test_an_episode_goes_over_the_wire(server: Server) -> None:
    environment = client(server)
    assert await environment.reset({"answer": 4}, 7) == Opening(({"role": "user", "content": "seed 7"},))
    assert (await environment.step(ANSWER)).done is False
    assert await environment.step(ANSWER) == Step(({"role": "user", "content": "more"},), done=True)
    assert await environment.reward() == 0.5
    await environment.reset({}, 8)
    await environment.close()
    await environment.close()
    assert server.paths() == ["/reset", "/step", "/step", "/reward", "/reset", "/close"]
    bodies = [body for _, body in server.requests]
    assert bodies[0]["columns"] == {"answer": 4} and bodies[0]["previous"] is None
    assert [body["number"] for body in bodies[1:3]] == [0, 1] and bodies[1]["answer"] == ANSWER
    assert bodies[4]["previous"] == bodies[0]["episode"] != bodies[4]["episode"]


@pytest.mark.parametrize("fault", ["408", "429", "500", "reset", "silence"])
async def test_a_request_whose_answer_was_lost_is_sent_again_unchanged(server: Server, fault: str) -> None:
    environment = client(server)
    await environment.reset({}, 7)
    server.faults = [fault]
    await environment.step(ANSWER)
    assert server.paths() == ["/reset", "/step", "/step"]
    assert server.requests[1] == server.requests[2]


async def test_an_episode_that_is_cancelled_in_the_middle_of_a_request_is_closed(server: Server) -> None:
    episodes = open_episodes(HttpEnvironment(url=server.url, timeout_seconds=5))
    assert episodes is not None

    async def rollout() -> None:
        async with episodes.episode() as episode:
            await episode.reset({}, 7)
            server.faults = ["silence"]
            await episode.step(ANSWER)

    task = asyncio.create_task(rollout())
    while "/step" not in server.paths():
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait({task})
    assert server.paths() == ["/reset", "/step", "/close"]
    assert server.requests[2][1]["episode"] == server.requests[0][1]["episode"]


async def test_a_refusal_is_final(server: Server) -> None:
    server.faults = ["404"]
    with pytest.raises(HttpEnvironmentError, match="/reset failed 1 times, the last with 404: scripted"):
        await client(server).reset({}, 7)
    assert server.paths() == ["/reset"]


async def test_attempts_are_bounded(server: Server) -> None:
    server.faults = ["503"] * 9
    with pytest.raises(HttpEnvironmentError, match="/reset failed 2 times, the last with 503"):
        await client(server, attempts=2).reset({}, 7)
    assert server.paths() == ["/reset"] * 2


async def test_silence_ends_before_the_deadline_of_the_call(server: Server) -> None:
    server.faults = ["silence"] * 9
    with pytest.raises(HttpEnvironmentError, match="no answer: silence for"):
        await asyncio.wait_for(client(server, seconds=0.5).reset({}, 7), 0.5)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("not json", "not JSON"),
        ("[1]", "not an object"),
        (json.dumps({"messages": ["x"]}), r"messages\[0\] is 'x'; return an object"),
        (json.dumps({"messages": "x"}), "messages is 'x'; return a tuple or list"),
    ],
)
async def test_an_answer_outside_the_contract_is_an_error(server: Server, answer: str, message: str) -> None:
    server.faults = [answer]
    with pytest.raises(EnvironmentFailed, match=f"reset of environment HttpClient failed: .*{message}"):
        await Episode(client(server), 5).reset({}, 7)


async def test_an_answer_without_a_reward_is_an_error_and_null_is_none(server: Server) -> None:
    server.faults = ["{}", '{"reward": null}', '{"reward": "high"}']
    with pytest.raises(HttpEnvironmentError, match="/reward answered {} without a reward"):
        await client(server).reward()
    assert await Episode(client(server), 5).reward() is None
    with pytest.raises(EnvironmentFailed, match="the result is 'high'"):
        await Episode(client(server), 5).reward()


async def test_what_an_answer_lacks_or_has_as_null_is_nothing(server: Server) -> None:
    server.faults = ["{}", '{"messages": null, "tools": null}', "{}"]
    assert await client(server).reset({}, 7) == await client(server).reset({}, 7) == Opening()
    assert await client(server).step(ANSWER) == Step()
