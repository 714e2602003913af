"""Environments written for the library verifiers, driven turn by turn.

The library samples in a loop of its own; here the engine's tokens are ours, so only three of its parts are used, by
their names and without importing it: `setup_state`, `env_response` with `is_completed`, and the rubric's functions with
their weights. Arguments are passed by name to whoever takes them, which covers the library's older and newer
signatures. Unlike in the library, a reward function that raises has failed and is not a zero.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from grpo_core.rollout.chat import Message
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


class Verifiers:
    """One rollout at a time of `environment`, which may be shared: all that changes is in the state kept here."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._functions = list(_reward_functions(getattr(environment, "rubric", None)))
        for function, _ in self._functions:
            asked = PLURAL & inspect.signature(function).parameters.keys()
            if asked:
                raise VerifiersError(
                    f"reward function {function.__name__} of the rubric asks for {sorted(asked)[0]} of a whole group; name it in rewards.functions"
                )

    async def reset(self, columns: Mapping[str, Any], seed: int) -> Opening:
        state: dict[str, Any] = {
            "answer": "", "info": {}, "task": "default", **columns,
            "completion": [], "trajectory": [], "responses": [], "turn": 0, "error": None, "timing": {}, "seed": seed,
        }  # fmt: skip
        if isinstance(state["info"], str):
            state["info"] = json.loads(state["info"] or "{}")
        state["prompt"] = [_record(message) for message in columns["prompt"]]
        state["input"] = {name: state[name] for name in ("prompt", "answer", "info", "task")}
        setup = getattr(self._environment, "setup_state", None)
        if setup is not None:
            # Some return the state and some only change it.
            state = await _called(setup, {"state": state}) or state
        self._state = state
        tools = state["info"].get("oai_tools") or getattr(self._environment, "oai_tools", None) or ()
        return Opening(tools=tuple(tools))

    async def step(self, answer: Message) -> Step:
        state, before = self._state, self._messages()
        state["completion"] = [*state["completion"], _record(answer)]
        state["trajectory"].append({"prompt": before, "completion": [_record(answer)], "response": None, "extras": {}})
        state["responses"].append(None)
        state["turn"] += 1
        respond = getattr(self._environment, "env_response", None)
        if respond is None or await self._is_completed():
            return Step(done=True)
        said = await _called(respond, {"messages": self._messages(), "state": state})
        if isinstance(said, tuple):
            said, self._state = said
            state = self._state
        listed = [{"role": "user", "content": said}] if isinstance(said, str) else [_plain(message) for message in said]
        state["completion"] = [*state["completion"], *(_record(message) for message in listed)]
        done = state.get("final_env_response") is not None or await self._is_completed()
        return Step(tuple(listed), done)

    async def reward(self) -> float | None:
        state = self._state
        objects = getattr(getattr(self._environment, "rubric", None), "class_objects", None) or {}
        known = {name: state[name] for name in ("prompt", "completion", "answer", "info", "task")}
        values = [
            weight * float(await _called(function, {**objects, **known, "state": state}))
            for function, weight in self._functions
        ]
        return math.fsum(values) if values else None

    def close(self) -> None:
        """The environment is shared and holds nothing for this instance."""

    def _messages(self) -> list[Message]:
        return [*self._state["prompt"], *self._state["completion"]]

    async def _is_completed(self) -> bool:
        ask = getattr(self._environment, "is_completed", None)
        known = {"messages": self._messages(), "state": self._state}
        return ask is not None and bool(await _called(ask, known))


def _reward_functions(rubric: Any) -> Iterator[tuple[Callable[..., Any], float]]:
    """Every function of a rubric, or of a group of rubrics, with its weight."""
    for inner in getattr(rubric, "rubrics", ()):
        yield from _reward_functions(inner)
    functions = getattr(rubric, "funcs", None) or getattr(rubric, "reward_funcs", None) or ()
    weights = getattr(rubric, "weights", None) or getattr(rubric, "reward_weights", None) or [1.0] * len(functions)
    yield from zip(functions, map(float, weights), strict=True)


async def _called(function: Callable[..., Any], known: Mapping[str, Any]) -> Any:
    """The result of `function` given those of the `known` arguments that it takes."""
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = known.keys() if takes_all else known.keys() & {parameter.name for parameter in parameters}
    result = function(**{name: known[name] for name in names})
    return await result if inspect.isawaitable(result) else result


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
