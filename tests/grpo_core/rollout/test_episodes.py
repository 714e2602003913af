"""Instances are reused, shared out by whole groups, and never used again after a failure."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import numpy as np
import pytest

from grpo_core.config import PythonEnvironment
from grpo_core.recipe import parse
from grpo_core.rollout.environments import Opening, Step
from grpo_core.rollout.episodes import EnvironmentFailed, Episode, Episodes, open_episodes
from tests.grpo_core.rollout.sample_environments import Counting

SAMPLES = "tests.grpo_core.rollout.sample_environments"
ANSWER = {"role": "assistant", "content": "x"}


@pytest.fixture(autouse=True)
def _none_made() -> None:
    Counting.made.clear()


def counting(instances: int = 4, seconds: float = 5, **arguments: Any) -> Episodes:
    config = PythonEnvironment(
        factory=f"{SAMPLES}:Counting", arguments=arguments, instances=instances, timeout_seconds=seconds
    )
    episodes = open_episodes(config)
    assert episodes is not None
    return episodes


async def test_an_episode_is_reset_stepped_and_rewarded() -> None:
    async with counting().episode() as episode:
        assert await episode.reset({"a": 1}, 17) == Opening(({"role": "user", "content": "task 7"},))
        assert await episode.step(ANSWER) == Step(({"role": "user", "content": "answer 1"},))
        assert await episode.step(ANSWER) == Step(done=True)
        assert await episode.reward() == 2.0
    assert Counting.made[0].resets == [({"a": 1}, 17)]


async def test_an_instance_is_made_once_and_reset_often() -> None:
    episodes = counting()
    for _ in range(3):
        async with episodes.episode() as episode:
            await episode.reset({}, 0)
    assert len(Counting.made) == 1 and len(Counting.made[0].resets) == 3
    await episodes.close()
    assert Counting.made[0].closed


@pytest.mark.parametrize("method", ["reset", "step", "reward"])
@pytest.mark.parametrize(
    ("fault", "message"), [("raise", "KeyError: 'lost'"), ("hang", "it did not return within 0.2 s")]
)
async def test_a_failed_instance_is_named_closed_and_not_used_again(method: str, fault: str, message: str) -> None:
    episodes = counting(seconds=0.2, hits=[0])
    with pytest.raises(EnvironmentFailed, match=f"{method} of environment Counting failed: .*{message}"):
        async with episodes.episode() as episode:
            await episode.reset({"word": f"{method} {fault}"}, 0)
            await episode.step(ANSWER)
            await episode.reward()
    async with episodes.episode() as episode:
        await episode.reset({}, 0)
    assert [each.closed for each in Counting.made] == [True, False]


async def test_an_instance_that_was_left_in_the_middle_of_a_call_is_not_used_again() -> None:
    episodes = counting(hits=[0])

    async def rollout() -> None:
        async with episodes.episode() as episode:
            await episode.reset({"word": "reset hang"}, 0)

    task = asyncio.create_task(rollout())
    while not Counting.made or not Counting.made[0].resets:
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait({task})
    assert Counting.made[0].closed


async def test_a_reward_that_is_no_number_is_a_failure_and_none_is_not() -> None:
    for word in ("unknown", "infinite"):
        async with counting().episode() as episode:
            await episode.reset({"word": word}, 0)
            if word == "unknown":
                assert await episode.reward() is None
            else:
                with pytest.raises(EnvironmentFailed, match="the result is inf"):
                    await episode.reward()


class Says:
    """Returns one thing from each of its methods."""

    def __init__(self, said: Any) -> None:
        self.said = said

    def reset(self, columns: Any, seed: int) -> Any:
        return self.said

    def step(self, answer: Any) -> Any:
        return self.said

    def reward(self) -> Any:
        return self.said


def message(**fields: Any) -> tuple[dict[str, Any], ...]:
    return ({"role": "user", "content": "x", **fields},)


@pytest.mark.parametrize(
    ("method", "said", "fault"),
    [
        ("reset", "a task", "the result is 'a task'; return an Opening"),
        ("reset", Opening(5), "messages is 5; return a tuple or list"),  # type: ignore[arg-type]
        ("reset", Opening("text"), "messages is 'text'"),  # type: ignore[arg-type]
        ("reset", Opening(("text",)), r"messages\[0\] is 'text'; return an object"),  # type: ignore[arg-type]
        ("reset", Opening(({"role": "user"},)), r"messages\[0\].content is None; return text"),
        ("reset", Opening(({"content": "x"},)), r"messages\[0\].role is None; return text"),
        ("reset", Opening(tools=({"function": {}},)), r"tools\[0\].name is None; return a name"),
        ("reset", Opening(tools=({"function": 3},)), r"tools\[0\].function is 3; return an object"),
        ("reset", Opening(tools=({"type": "function"},)), r"tools\[0\].name is None"),
        ("step", None, "the result is None; return a Step"),
        ("step", Step(done=1), "done is 1; return True or False"),  # type: ignore[arg-type]
        ("step", Step(message(role="")), r"messages\[0\].role is ''"),
        ("step", Step((*message(), *message(content=3))), r"messages\[1\].content is 3; return text"),
        ("step", Step(message(content=["a"])), r"messages\[0\].content is \['a'\]; return text"),
        ("step", Step(message(extra={1, 2})), r"messages\[0\] is .*; return JSON values"),
        ("step", Step(message(extra={(1, 2): 3})), r"messages\[0\] is .*; return JSON values"),
        ("step", Step(message(content="\ud800")), r"messages\[0\] is .*; return JSON values in UTF-8"),
        ("reward", "1.0", "the result is '1.0'; return a finite number"),
        ("reward", math.nan, "the result is nan"),
        ("reward", 10**400, "the result is 1000"),
        ("reward", [1.0], r"the result is \[1.0\]"),
    ],
)
async def test_what_an_environment_must_not_return_names_it_the_field_and_the_value(
    method: str, said: Any, fault: str
) -> None:
    episode = Episode(Says(said), 5)  # type: ignore[arg-type]
    arguments: dict[str, tuple[Any, ...]] = {"reset": ({}, 0), "step": (ANSWER,), "reward": ()}
    with pytest.raises(EnvironmentFailed, match=f"{method} of environment Says failed: OutputFault: {fault}"):
        await getattr(episode, method)(*arguments[method])
    assert episode.failed


async def test_what_passes_is_a_copy_that_the_environment_cannot_change() -> None:
    said = {"role": "user", "content": "x", "extra": {"of": [1, 2]}}
    step = await Episode(Says(Step([said])), 5).step(ANSWER)  # type: ignore[arg-type, list-item]
    said["extra"]["of"].clear()  # type: ignore[index]
    assert step.messages == (message(extra={"of": [1, 2]})[0],)


@pytest.mark.parametrize(("value", "reward"), [(np.float32(0.5), 0.5), (np.int64(2), 2.0), (True, 1.0), (None, None)])
async def test_a_number_of_any_kind_is_a_reward(value: Any, reward: float | None) -> None:
    assert await Episode(Says(value), 5).reward() == reward  # type: ignore[arg-type]


async def test_siblings_do_not_share_the_columns_that_they_are_given() -> None:
    class Appends(Counting):
        def reset(self, columns: Any, seed: int) -> Opening:
            columns["prompt"].append("mine")
            return super().reset(columns, seed)

    columns = {"prompt": ["theirs"]}
    await Episode(Appends(), 5).reset(columns, 0)
    assert columns == {"prompt": ["theirs"]}


async def late_instance(episodes: Episodes, gate: threading.Event) -> Counting:
    """The instance that came after whoever wanted it had gone."""
    assert Counting.made == []
    gate.set()
    while not Counting.made or not Counting.made[0].closed:
        await asyncio.sleep(0.01)
    return Counting.made[0]


async def test_an_instance_that_is_made_too_late_is_closed() -> None:
    gate = threading.Event()

    def slowly() -> Counting:
        gate.wait(20)
        return Counting()

    episodes = Episodes(slowly, instances=2, timeout_seconds=0.1)
    with pytest.raises(EnvironmentFailed, match=r"cannot be made: DeadlinePassed: .* within 0.1 s"):
        async with episodes.episode():
            pass
    assert (await late_instance(episodes, gate)).closed


async def test_an_instance_that_is_made_for_a_cancelled_rollout_is_closed() -> None:
    gate, begun = threading.Event(), threading.Event()

    def slowly() -> Counting:
        begun.set()
        gate.wait(20)
        return Counting()

    episodes = Episodes(slowly, instances=2, timeout_seconds=20)

    async def rollout() -> None:
        async with episodes.episode():
            pass

    task = asyncio.create_task(rollout())
    await asyncio.to_thread(begun.wait, 20)
    task.cancel()
    await asyncio.wait({task})
    assert (await late_instance(episodes, gate)).closed


async def test_an_instance_in_use_when_all_is_closed_is_closed_after_it() -> None:
    episodes = counting()
    async with episodes.episode() as episode:
        await episode.reset({}, 0)
        await episodes.close()
        assert not Counting.made[0].closed
    assert Counting.made[0].closed


async def test_no_more_instances_are_kept_than_may_be_in_use() -> None:
    episodes = counting(instances=1)
    async with episodes.episode(), episodes.episode():
        pass
    assert sorted(instance.closed for instance in Counting.made) == [False, True]


async def test_an_instance_that_cannot_be_made_fails_the_rollout() -> None:
    episodes = open_episodes(PythonEnvironment(factory=f"{SAMPLES}:broken"))
    assert episodes is not None
    with pytest.raises(EnvironmentFailed, match="cannot be made: OSError: no machine"):
        async with episodes.episode():
            pass


async def test_groups_get_all_their_places_or_wait() -> None:
    episodes = counting(instances=4)
    async with episodes.places(3, deadline_seconds=1):
        with pytest.raises(EnvironmentFailed, match=r"no room for 2 rollouts .*; raise environment.instances"):
            async with episodes.places(2, deadline_seconds=0.2):
                pass
        async with episodes.places(1, deadline_seconds=1):
            pass
    async with episodes.places(9, deadline_seconds=1):
        with pytest.raises(EnvironmentFailed):
            async with episodes.places(1, deadline_seconds=0.2):
                pass


def test_an_environment_that_cannot_be_imported_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"environment.factory nowhere:Nothing cannot be imported"):
        open_episodes(PythonEnvironment(factory="nowhere:Nothing"))


async def test_a_wrong_answer_may_be_tried_again() -> None:
    environment = {"kind": "reasoning_gym", "attempts": 3, "decay": 0.5, "feedback": "No."}
    episodes = open_episodes(parse({"environment": environment}, where="test").environment)
    assert episodes is not None
    entry = '{"question": "2 + 2 =", "answer": "4", "metadata": {}}'

    async def answered(*answers: str) -> tuple[list[Step], float | None]:
        async with episodes.episode() as episode:
            assert await episode.reset({"task": "chain_sum", "entry": entry}, 0) == Opening()
            steps = [await episode.step({"role": "assistant", "content": text}) for text in answers]
            return steps, await episode.reward()

    steps, reward = await answered("5", " 4 ")
    assert steps == [Step(({"role": "user", "content": "No."},)), Step(done=True)]
    assert reward == 0.5
    assert (await answered("4"))[1] == 1.0
    assert (await answered("five", "six", "seven"))[0][-1].done
    assert (await answered())[1] is None
