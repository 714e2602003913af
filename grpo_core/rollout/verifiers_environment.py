"""Environments written for the library verifiers, driven turn by turn.

The library samples in a loop of its own; here the engine's tokens are ours, so only some of its parts are used, by
their names and without importing it: `setup_state`, `env_response` with `is_completed`, the handlers that clean up
after a rollout, and the rubric's functions with their weights. Arguments are passed by name to whoever takes them,
which covers the library's older and newer signatures.
Unlike in the library, a reward function that raises has failed and is not a zero.

All rollouts share one environment, whose coroutines run on one event loop for all leases, as in the library; its plain
functions run on threads, so that one that hangs is late alone. Each rollout is cleaned up after once: by the library
when it finds the rollout completed, otherwise before the reward, as it would,
or at the latest when the instance is reset or closed.
"""

from __future__ import annotations

import inspect
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from grpo_core.rollout.chat import Message
from grpo_core.rollout.concurrency import ForeignCalls, LoopThread
from grpo_core.rollout.environments import Opening, Step

# What a function over a whole group would ask for.
PLURAL = {"states", "prompts", "completions", "answers", "tasks", "infos"}


class VerifiersError(ValueError):
    """An environment of the library that cannot be used here."""


class Record(dict[str, Any]):
    """A message whose fields can also be read as attributes, as in the library's newer versions."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True, slots=True)
class Shared:
    """What the rollouts of an environment have in common. Raise VerifiersError for one that cannot be used here."""

    environment: Any
    functions: tuple[tuple[Callable[..., Any], float], ...] = field(init=False)
    loop: LoopThread = field(default_factory=lambda: LoopThread("verifiers"))
    calls: ForeignCalls = field(default_factory=lambda: ForeignCalls("the verifiers environment"))

    def __post_init__(self) -> None:
        functions = tuple(_reward_functions(getattr(self.environment, "rubric", None)))
        for function, _ in functions:
            asked = PLURAL & inspect.signature(function).parameters.keys()
            if asked:
                raise VerifiersError(
                    f"reward function {function.__name__} of the rubric asks for {sorted(asked)[0]} of a whole group; name it in rewards.functions"
                )
        object.__setattr__(self, "functions", functions)

    async def called(self, function: Callable[..., Any], known: Mapping[str, Any]) -> Any:
        """The result of `function` given those of the `known` arguments that it takes."""
        parameters = inspect.signature(function).parameters.values()
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        names = known.keys() if takes_all else known.keys() & {parameter.name for parameter in parameters}
        call = partial(function, **{name: known[name] for name in names})
        if inspect.iscoroutinefunction(function):
            return await self.loop.result(call())
        result = await self.calls.on_a_thread(call)
        return await self.loop.result(result) if inspect.isawaitable(result) else result


def load(loader: Callable[..., Any], arguments: Mapping[str, Any]) -> Shared:
    """The environment that `loader` makes. Raise VerifiersError.

    An environment of the library takes SIGINT and SIGTERM for itself, and would end the process in the middle of a
    step; they go back to whoever had them.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        environment = loader(**arguments)
    except Exception as error:
        raise VerifiersError(
            f"environment.loader cannot load its environment with {dict(arguments)}: {type(error).__name__}: {error}"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return Shared(environment)


class Verifiers:
    """One rollout at a time of a shared environment: all that changes is in the state kept here."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._environment = shared.environment
        self._state: dict[str, Any] = {}
        self._cleaned_up = True

    async def reset(self, columns: Mapping[str, Any], seed: int) -> Opening:
        """A new state, as the library makes it of a row of its dataset, and the tools it names."""
        await self._clean_up()
        state: dict[str, Any] = {
            "answer": "", "info": {}, "task": "default", **columns,
            "completion": [], "trajectory": [], "responses": [], "turn": 0, "error": None, "seed": seed,
            "timing": {"start_time": time.time(), "generation_ms": 0.0, "scoring_ms": 0.0, "total_ms": 0.0},
        }  # fmt: skip
        if isinstance(state["info"], str):
            state["info"] = json.loads(state["info"] or "{}")
        state["prompt"] = [_record(message) for message in columns["prompt"]]
        state["input"] = {name: state[name] for name in ("prompt", "answer", "info", "task")}
        self._state, self._cleaned_up = state, False
        setup = getattr(self._environment, "setup_state", None)
        if setup is not None:
            # Some return the state and some only change it.
            self._state = state = await self._shared.called(setup, {"state": state}) or state
        tools = state["info"].get("oai_tools") or getattr(self._environment, "oai_tools", None) or ()
        return Opening(tools=tuple(tools))

    async def step(self, answer: Message) -> Step:
        """What the environment says to an answer, unless the rollout is completed by it."""
        state, before = self._state, self._messages()
        state["completion"] = [*state["completion"], _record(answer)]
        state["trajectory"].append({"prompt": before, "completion": [_record(answer)], "response": None, "extras": {}})
        state["responses"].append(None)
        state["turn"] += 1
        respond = getattr(self._environment, "env_response", None)
        if respond is None or await self._is_completed():
            return Step(done=True)
        said = await self._shared.called(respond, {"messages": self._messages(), "state": state})
        if isinstance(said, tuple):
            said, self._state = said
            state = self._state
        listed = [{"role": "user", "content": said}] if isinstance(said, str) else [_plain(message) for message in said]
        state["completion"] = [*state["completion"], *(_record(message) for message in listed)]
        done = state.get("final_env_response") is not None or await self._is_completed()
        return Step(tuple(listed), done)

    async def reward(self) -> float | None:
        """The weighted sum of the rubric's functions; None where it has none."""
        await self._clean_up()
        state = self._state
        objects = getattr(getattr(self._environment, "rubric", None), "class_objects", None) or {}
        known = {name: state[name] for name in ("prompt", "completion", "answer", "info", "task")}
        values = [
            weight * float(await self._shared.called(function, {**objects, **known, "state": state}))
            for function, weight in self._shared.functions
        ]
        return math.fsum(values) if values else None

    async def close(self) -> None:
        await self._clean_up()

    async def _clean_up(self) -> None:
        """Let the environment give up what it holds for this rollout, unless it has done so."""
        handlers = getattr(self._environment, "_cleanup", None)
        if not self._cleaned_up and handlers is not None:
            self._cleaned_up = True
            await self._shared.called(handlers, {"state": self._state})

    def _messages(self) -> list[Message]:
        return [*self._state["prompt"], *self._state["completion"]]

    async def _is_completed(self) -> bool:
        ask = getattr(self._environment, "is_completed", None)
        known = {"messages": self._messages(), "state": self._state}
        completed = ask is not None and bool(await self._shared.called(ask, known))
        # Where the library has handlers, it has called them by now.
        self._cleaned_up = self._cleaned_up or completed
        return completed


def _reward_functions(rubric: Any) -> Iterator[tuple[Callable[..., Any], float]]:
    """Every function of a rubric, or of a group of rubrics, with its weight; those of weight 0 only measure."""
    for inner in getattr(rubric, "rubrics", ()):
        yield from _reward_functions(inner)
    functions = getattr(rubric, "funcs", None) or getattr(rubric, "reward_funcs", None) or ()
    weights = getattr(rubric, "weights", None) or getattr(rubric, "reward_weights", None) or [1.0] * len(functions)
    yield from ((each, float(weight)) for each, weight in zip(functions, weights, strict=True) if weight)


def _record(message: Mapping[str, Any]) -> Record:
    """The message, with calls as the library knows them: arguments as JSON text, under `function` and beside it."""
    record = Record(message)
    if message.get("tool_calls"):
        record["tool_calls"] = [
            Record(id=call["id"], type="function", name=function["name"], arguments=arguments, function=Record(name=function["name"], arguments=arguments))
            for call in message["tool_calls"]
            for function in [call["function"]]
            for arguments in [json.dumps(function["arguments"])]
        ]  # fmt: skip
    else:
        record.setdefault("tool_calls", None)
    return record


def _plain(message: Any) -> Message:
    """A message of the environment as a plain object; newer versions of the library have classes for them."""
    return dict(message) if isinstance(message, Mapping) else dict(message.model_dump(exclude_none=True))
