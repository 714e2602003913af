"""A reward function may hang, crash, print or lie: it costs one group and never the run."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_core.config import RewardFunction, RewardsConfig
from grpo_core.rollout.rewards import RewardError, RewardWorkers, Scores

ROOT = Path(__file__).parents[3]
SAMPLES = "tests.grpo_core.rollout.sample_rewards"


@pytest.fixture(autouse=True)
def _from_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@contextlib.contextmanager
def workers(*names: str, timeout: float = 30, **weights: float) -> Iterator[RewardWorkers]:
    functions = tuple(RewardFunction(function=f"{SAMPLES}:{name}", weight=weights.get(name, 1.0)) for name in names)
    with RewardWorkers(RewardsConfig(functions=functions, timeout_seconds=timeout)) as started:
        yield started


def score(pool: RewardWorkers, *texts: str, **columns: Any) -> Scores:
    return pool.score(
        prompts=[[{"role": "user", "content": "q"}]] * len(texts),
        completions=[[{"role": "assistant", "content": text}] for text in texts],
        completion_ids=[[1]] * len(texts),
        columns={name: [value] * len(texts) for name, value in columns.items()},
    )


@pytest.fixture(scope="module")
def on_word() -> Iterator[RewardWorkers]:
    before = Path.cwd()
    os.chdir(ROOT)
    with workers("on_word", timeout=1.5) as started:
        started.check()
        os.chdir(before)
        yield started


def pid(pool: RewardWorkers) -> int:
    return int(score(pool, "a", word="pid").rewards[0])


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_sources_are_weighted_and_kept_apart() -> None:
    with workers("lengths", "awaited", lengths=2.0, awaited=-1.0) as pool:
        scores = score(pool, "abc", "")
    assert scores.rewards == [5.75, -0.25]
    assert scores.components == {f"{SAMPLES}:lengths": [3.0, 0.0], f"{SAMPLES}:awaited": [0.25, 0.25]}


def test_functions_get_prompts_token_ids_and_columns() -> None:
    with workers("echo_arguments") as pool:
        scores = pool.score(
            prompts=[[{"role": "user", "content": "q"}]] * 2,
            completions=[[], []],
            completion_ids=[[1, 2], [3]],
            columns={"answer": ["4", "4"], "other": [None, {"a": 1}]},
        )
    assert scores.rewards == [1.0, 2.0]


def test_what_a_function_prints_does_not_break_the_protocol() -> None:
    with workers("talkative") as pool:
        assert [score(pool, "a", "b").rewards for _ in range(3)] == [[1.0, 1.0]] * 3


def test_none_and_nan_mean_unscorable_and_never_zero() -> None:
    with workers("uncertain") as pool:
        scores = score(pool, "a", "b", "c", "d")
    assert scores.components[f"{SAMPLES}:uncertain"] == [None, None, 1.0, 2.0]
    assert math.isnan(scores.rewards[0]) and math.isnan(scores.rewards[1]) and scores.rewards[2:] == [1.0, 2.0]
    with workers("uncertain", "lengths") as pool:
        assert score(pool, "abc").rewards == [3.0]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("raise", "KeyError"),
        ("short", "1 values for 2 completions"),
        ("infinite", "inf"),
        ("text", "could not convert string to float"),
        ("nothing", "NoneType"),
    ],
)
def test_a_wrong_answer_is_an_error_and_the_worker_lives_on(on_word: RewardWorkers, word: str, message: str) -> None:
    before = pid(on_word)
    with pytest.raises(RewardError, match="on_word") as caught:
        score(on_word, "a", "b", word=word)
    assert message in str(caught.value)
    assert pid(on_word) == before


@pytest.mark.parametrize(
    ("word", "message"),
    [("hang", "within 1.5 s"), ("busy", "within 1.5 s"), ("die", "status 7"), ("leave", "status 3")],
)
def test_a_hang_or_a_crash_is_an_error_and_the_worker_is_replaced(
    on_word: RewardWorkers, word: str, message: str
) -> None:
    before = pid(on_word)
    with pytest.raises(RewardError, match=message):
        score(on_word, "a", "b", word=word)
    assert not psutil.pid_exists(before)
    assert pid(on_word) != before


def test_a_worker_that_was_killed_while_idle_is_replaced(on_word: RewardWorkers) -> None:
    os.kill(pid(on_word), signal.SIGKILL)
    with pytest.raises(RewardError):
        score(on_word, "a", word="pid")
    assert pid(on_word)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_function", "cannot be imported"),
        ("not_a_function", "is a int, not a function"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_at_the_check(name: str, message: str) -> None:
    with workers(name) as pool, pytest.raises(RewardError, match=message):
        pool.check()


def test_closing_ends_the_workers() -> None:
    with workers("on_word") as pool:
        worker = pid(pool)
    assert not psutil.pid_exists(worker)


def test_after_closing_nothing_is_scored_and_no_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with workers("on_word") as pool:
        pool.check()
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **options: pytest.fail("a worker was started"))
    for _ in range(2):
        with pytest.raises(RewardError, match="are closed"):
            score(pool, "a", word="pid")


def test_closing_ends_a_call_that_is_under_way() -> None:
    with workers("on_word") as pool, ThreadPoolExecutor(1) as thread:
        worker = psutil.Process(pid(pool))
        waiting = thread.submit(score, pool, "a", word="hang")
        assert until(lambda: worker.num_threads() > 2)
        pool.close()
        with pytest.raises(RewardError, match="died with status -9"):
            waiting.result(20)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "in a call"])
def test_a_worker_ends_when_its_parent_is_killed(tmp_path: Path, busy: bool) -> None:
    script = f"""
import sys, time
from grpo_core.config import RewardFunction, RewardsConfig
from grpo_core.rollout.rewards import RewardWorkers
pool = RewardWorkers(RewardsConfig(functions=(RewardFunction(function="{SAMPLES}:on_word"),)))
def call(word):
    one = [[{{"role": "assistant", "content": "a"}}]]
    return pool.score(prompts=[[]], completions=one, completion_ids=[[1]], columns={{"word": [word]}})
print(int(call("pid").rewards[0]), flush=True)
call("busy") if {busy} else time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        assert until(lambda: not busy or worker.num_threads() > 2)
    finally:
        parent.kill()
        parent.communicate()
    assert until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)


def test_the_built_in_scorers_agree_with_their_library() -> None:
    from grpo_core.rollout.rewards import exact_match, reasoning_gym_score

    completions = [[{"role": "assistant", "content": text}] for text in (" 4 ", "5")]
    assert exact_match(completions, ["4", "4"]) == [1.0, 0.0]
    entry = '{"question": "2 + 2 =", "answer": "4", "metadata": {}}'
    assert reasoning_gym_score(completions, [entry] * 2, ["chain_sum"] * 2)[0] == 1.0
    assert reasoning_gym_score(completions, [entry] * 2, ["chain_sum"] * 2)[1] < 1.0
