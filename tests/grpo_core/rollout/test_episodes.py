"""Instances are reused, shared out by whole groups, and never used again after a failure."""

from __future__ import annotations

import asyncio
from typing import Any

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
                with pytest.raises(EnvironmentFailed, match="returned inf"):
                    await episode.reward()


async def test_an_answer_of_the_wrong_type_is_a_failure() -> None:
    class Wrong:
        def reset(self, columns: Any, seed: int) -> Any:
            return "a task"

    with pytest.raises(EnvironmentFailed, match="returned 'a task'"):
        await Episode(Wrong(), 5).reset({}, 0)  # type: ignore[arg-type]


async def test_an_instance_that_cannot_be_made_fails_the_rollout() -> None:
    episodes = open_episodes(PythonEnvironment(factory=f"{SAMPLES}:broken"))
    assert episodes is not None
    with pytest.raises(EnvironmentFailed, match="cannot be made: OSError: no machine"):
        async with episodes.episode():
            pass


async def test_groups_get_all_their_places_or_wait() -> None:
    episodes = counting(instances=4)
    async with episodes.places(3, deadline_seconds=1):
        with pytest.raises(EnvironmentFailed, match=r"no room for 2 rollouts .* raise environment.instances"):
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
