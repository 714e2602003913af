"""A reward function may hang, crash, print or lie: it costs one group and never the run."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_core.config import RewardFunction, RewardsConfig
from grpo_core.rollout import reward_process
from grpo_core.rollout.rewards import RewardError, RewardWorkers, Scores, with_source

ROOT = Path(__file__).parents[3]
SAMPLES = "tests.grpo_core.rollout.sample_rewards"
FUNCTION = RewardsConfig(functions=(RewardFunction(function="m:f"),), timeout_seconds=20)


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


def test_a_group_that_waits_for_its_turn_is_queued_and_says_for_how_long() -> None:
    functions = (RewardFunction(function=f"{SAMPLES}:on_word"),)
    one_by_one = RewardsConfig(functions=functions, workers=1, groups_per_worker=1, timeout_seconds=0.5)
    with RewardWorkers(one_by_one) as pool, ThreadPoolExecutor() as threads:
        pool.check()
        hanging = threads.submit(score, pool, "a", word="hang")
        assert until(lambda: len(pool._calls) == 1 and pool.metrics() == {"scoring/queued": 0.0})
        second = threads.submit(score, pool, "a", word="pid")
        assert until(lambda: pool.metrics() == {"scoring/queued": 1.0})
        with pytest.raises(RewardError):
            hanging.result()
        scores = second.result()
        assert pool.metrics() == {"scoring/queued": 0.0}
    assert scores.wait_seconds > 0 and scores.seconds > 0
    assert with_source(scores, "environment", [1.0], 1.0).wait_seconds == scores.wait_seconds


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
        ("stop", "StopIteration() (on_word"),
        ("cancel", "CancelledError"),
        ("interrupt", "KeyboardInterrupt"),
        ("wordy", "ValueError: xxx"),
        ("complex", "complex"),
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


@pytest.mark.parametrize(
    ("word", "message", "timeout"),
    [
        ("fork die", "died with status 7", 20),
        ("fork away die", "died with status 7", 20),
        ("fork away hang", "within 1 s", 1),
    ],
)
def test_what_a_function_forked_does_not_hide_the_end_of_its_worker(word: str, message: str, timeout: float) -> None:
    """It has the worker's output, so that this does not end with the worker."""
    with workers("on_word", timeout=timeout) as pool:
        before = pool._workers[0]._process.pid
        with pytest.raises(RewardError, match=message):
            score(pool, "a", word=word)
        assert not psutil.pid_exists(before)


SPEAKER = """
import sys, time
for line in (b'{"ready": true}', None, *map(bytes.fromhex, sys.argv[1:])):
    if line is None:
        sys.stdin.readline()
    else:
        sys.stdout.buffer.write(line + b"\\n")
        sys.stdout.buffer.flush()
time.sleep(600)
"""


async def speaker(*lines: bytes) -> reward_process.RewardProcess:
    """A worker that says these lines once it is asked something, and then nothing."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-Sc", SPEAKER, *(line.hex() for line in lines)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1000,
        start_new_session=True,
    )
    return reward_process.RewardProcess(FUNCTION, process)


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[1]",
        b"\xff\xfe",
        b"[" * 900,
        b"x" * 2000,
        b'{"id": 1}',
        b'{"id": 1, "rewards": [1.0]}',
        b'{"id": 1, "rewards": {"m:other": [1.0]}}',
        b'{"id": 1, "rewards": {"m:f": 1.0}}',
        b'{"id": 1, "rewards": {"m:f": ["1.0"]}}',
        b'{"id": 1, "rewards": {"m:f": [true]}}',
    ],
)
def test_a_worker_that_says_nonsense_is_ended_and_its_groups_hear_of_it(line: bytes) -> None:
    async def run() -> None:
        worker = await speaker(line)
        with pytest.raises(reward_process.WorkerLost, match="said what no worker says"):
            await worker.call({"completions": [[]]})
        assert worker._process.returncode == -signal.SIGKILL and not worker.takes_calls

    asyncio.run(run())


def test_an_answer_that_nobody_waits_for_is_passed_over() -> None:
    async def run() -> dict[str, list[float | None]]:
        worker = await speaker(
            b'{"id": [1]}', b'{"id": 7, "rewards": 3}', b'{"id": 1, "rewards": {"m:f": [1.0, null]}}'
        )
        answer = await worker.call({"completions": [[], []]})
        await worker.end()
        return answer

    assert asyncio.run(run()) == {"m:f": [1.0, None]}


def test_an_async_function_that_raises_a_cancellation_is_an_error_at_once() -> None:
    with workers("cancelled") as pool, pytest.raises(RewardError, match="cancelled raised CancelledError"):
        score(pool, "a")


def test_what_a_function_starts_has_not_our_input(on_word: RewardWorkers) -> None:
    before = pid(on_word)
    assert side_by_side(on_word, ["read", "pid"]) == [before, before]


def test_what_a_function_starts_ends_with_its_worker() -> None:
    with workers("on_word") as pool:
        child = psutil.Process(int(score(pool, "a", word="child").rewards[0]))
        with pytest.raises(RewardError, match="status 7"):
            score(pool, "a", word="die")
        assert until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
        child = psutil.Process(int(score(pool, "a", word="child").rewards[0]))
    assert until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_a_stopped_worker_costs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_process, "SILENT_SECONDS", 0.5)
    with workers("on_word") as pool:
        stopped = pid(pool)
        os.kill(stopped, signal.SIGSTOP)
        assert score(pool, "a", word="pid").rewards[0] != stopped
        assert until(lambda: not psutil.pid_exists(stopped))
        assert pid(pool) != stopped


def test_what_cannot_be_sent_is_an_error_of_its_group(on_word: RewardWorkers) -> None:
    before = pid(on_word)
    with pytest.raises(RewardError, match="cannot be sent to its reward worker: keys must be"):
        score(on_word, "a", word="pid", facts={(1, 2): 3})
    assert score(on_word, "a", word="pid", day=date(2026, 1, 2)).rewards == [before]


def test_a_worker_that_was_killed_while_idle_costs_no_group(on_word: RewardWorkers) -> None:
    killed = pid(on_word)
    os.kill(killed, signal.SIGKILL)
    assert score(on_word, "a", word="pid").rewards[0] != killed


def side_by_side(pool: RewardWorkers, words: Sequence[str]) -> list[str | float]:
    """The reward of one group for each word, all under way at once; the error's text where there is none."""
    futures = [
        pool.submit(prompts=[[]], completions=[[]], completion_ids=[[1]], columns={"word": [word]}) for word in words
    ]
    errors = [future.exception(60) for future in futures]
    return [str(error) if error else future.result().rewards[0] for error, future in zip(errors, futures, strict=True)]


@pytest.mark.parametrize("name", ["meet", "meet_awaited"])
def test_groups_that_wait_wait_together(name: str) -> None:
    """Each of the 32 waits for the 31 others, so that they are done only if all are scored at the same time."""
    with workers(name) as pool:
        assert side_by_side(pool, ["go"] * 32) == [1.0] * 32


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("die", "died with status 7"),
        ("leak", "more than rewards.worker_memory_bytes=536870912"),
        ("hold", "within 3 s"),
        ("hang", "within 3 s"),
    ],
)
def test_what_one_group_does_to_its_worker_costs_that_group_alone(
    monkeypatch: pytest.MonkeyPatch, word: str, message: str
) -> None:
    monkeypatch.setattr(reward_process, "SILENT_SECONDS", 1.0)
    functions = (RewardFunction(function=f"{SAMPLES}:on_word"),)
    config = RewardsConfig(functions=functions, timeout_seconds=3, worker_memory_bytes=1 << 29)
    with RewardWorkers(config) as pool:
        pool.check()
        before, culprit, after = side_by_side(pool, ["nap", word, "nap"])
        assert isinstance(before, float) and isinstance(after, float)
        assert message in str(culprit) and SAMPLES in str(culprit)
        assert pid(pool) not in (before, after)


def test_a_group_that_is_late_does_not_hold_up_the_others() -> None:
    with workers("on_word", timeout=20) as pool:
        late = pool.submit(prompts=[[]], completions=[[]], completion_ids=[[1]], columns={"word": ["hang"]})
        assert pid(pool)
        assert not late.done()
        late.cancel()


def test_a_group_that_was_given_up_leaves_the_worker_to_the_others(on_word: RewardWorkers) -> None:
    before = pid(on_word)
    given_up = on_word.submit(prompts=[[]], completions=[[]], completion_ids=[[1]], columns={"word": ["nap"]})
    given_up.cancel()
    assert pid(on_word) == before


def test_a_group_that_was_given_up_and_hangs_costs_its_worker_at_its_deadline() -> None:
    with workers("on_word", timeout=1.0) as pool:
        before = pid(pool)
        given_up = pool.submit(prompts=[[]], completions=[[]], completion_ids=[[1]], columns={"word": ["hang"]})
        assert until(lambda: psutil.Process(before).num_threads() > 3)
        given_up.cancel()
        assert until(lambda: not psutil.pid_exists(before))
        assert pid(pool) != before


def test_methods_and_callable_objects_may_score() -> None:
    with workers("Scorer.static", "half", "half_awaited") as pool:
        assert score(pool, "a", "b").rewards == [2.0, 2.0]


def test_without_functions_nothing_is_scored_and_the_environment_may_still_say_something() -> None:
    with RewardWorkers(RewardsConfig(functions=())) as pool:
        scores = score(pool, "a", "b")
    assert scores.components == {} and all(map(math.isnan, scores.rewards))
    joined = with_source(scores, "environment", [0.5, None], 2.0)
    assert joined.components == {"environment": [0.5, None]}
    assert joined.rewards[0] == 1.0 and math.isnan(joined.rewards[1])
    assert with_source(Scores({"f": [1.0]}, [3.0]), "environment", [0.5], -1.0).rewards == [2.5]


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
        with pytest.raises(RewardError, match="are closed"):
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


def test_math_verify_knows_equal_answers_in_other_words() -> None:
    pytest.importorskip("math_verify")
    with RewardWorkers(
        RewardsConfig(functions=(RewardFunction(function="grpo_core.rollout.rewards:math_verify"),))
    ) as pool:
        scores = score(
            pool, r"so it is $\frac{1}{2}$", "The answer is 0.5", r"\boxed{2}", "no idea", answer=r"\frac{2}{4}"
        )
        unscorable = score(pool, "4", answer="")
    assert scores.rewards == [1.0, 1.0, 0.0, 0.0]
    assert math.isnan(unscorable.rewards[0])
