"""The life of one prompt, as `forebay trace` tells it."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from flows.views.trace import trace
from flows.views.trace_view import render_trace
from storage import layout
from storage.objects import ObjectStore
from tests.flows.requests import requests_of
from tests.flows.synthetic_run import HOSTILE, PROMPT_TOKENS, SyntheticRun, small_run


class Names:
    def pieces(self, ids):
        return [f"<{token}>" for token in ids]


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    store = ObjectStore.open(str(tmp_path / "synthetic"))
    small_run(store)
    return store


def shown(found) -> str:
    target = io.StringIO()
    Console(file=target, width=200, force_terminal=True, color_system=None).print(render_trace(found))
    return target.getvalue()


def test_every_lease_of_every_attempt_is_told(store):
    found = trace(store, 7)
    assert found["state"] == "trained"
    assert [(lease["attempt"], lease["lease"], lease["stamp"]) for lease in found["leases"]] == [
        (1, 3, "1.0"),
        (2, 0, "2.2"),
        (2, 2, "2.3"),
    ]
    assert [[(d["state"], d["step"]) for d in lease["decisions"]] for lease in found["leases"]] == [
        [],
        [("returned", 3)],
        [("trained", 5)],
    ]


def test_a_group_trained_on_both_branches_has_both_decisions(store):
    [lease] = trace(store, 5)["leases"]
    assert [(d["attempt"], d["step"], d["living"]) for d in lease["decisions"]] == [(1, 3, False), (2, 3, True)]


def test_rows_carry_rewards_messages_and_advantages(store):
    [lease] = trace(store, 5)["leases"]
    [part] = lease["parts"]
    first, second = part["rows"]
    assert (first["rollout"], first["reward"], first["reward_components"], first["advantage"]) == (
        0,
        1.0,
        {"correct": 1.0},
        0.5,
    )
    assert (second["reward"], second["advantage"], second["turns"], second["finish_reason"]) == (0.0, -0.5, 1, "stop")
    assert [message["role"] for message in first["messages"]] == ["user", "assistant"]
    assert first["seconds"] == 1.5


def test_tokens_pair_the_engine_with_the_trainer(store):
    [lease] = trace(store, 5, Names())["leases"]
    for row in lease["parts"][0]["rows"]:
        assert [token["position"] for token in row["tokens"]] == list(
            range(PROMPT_TOKENS, PROMPT_TOKENS + len(row["tokens"]))
        )
        for number, token in enumerate(row["tokens"]):
            assert token["engine"] == pytest.approx(-0.25 * (number + 1))
            assert token["difference"] == pytest.approx(0.01, abs=1e-6)
            assert token["trainer"] == pytest.approx(token["engine"] + 0.01, abs=1e-6)
            assert (token["stamp"], token["lag"], token["masked"]) == ("1.1", 1, False)
            assert token["text"] == f"<{token['id']}>"


def test_what_a_group_did_and_cost_is_told(tmp_path):
    run = SyntheticRun(ObjectStore.open(str(tmp_path / "tools")))
    run.claim()
    called = {"function": {"name": "calculator", "arguments": {"expression": "1+1"}}}
    messages = [
        {"role": "user", "content": "How much?"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": HOSTILE},
    ]
    facts = {
        "messages": json.dumps(messages), "turns": 2, "tool_calls": 3, "tool_failures": 1,
        "tool_usage": [{"name": "calculator", "calls": 3, "failures": 1, "seconds": 0.25}],
        "environment_usage": [{"name": "step", "calls": 2, "failures": 0, "seconds": 0.5}],
        "joins_realign": 1, "joins_fork": 2, "drift_tokens": 9,
        "failed_requests": 4, "aborted_requests": 1, "discarded_tokens": 120,
        "scoring_wait_seconds": 0.5, "scoring_seconds": 2.0,
    }  # fmt: skip
    run.arrive(run.lease([0]), {0: [1, 0]}, last=True, **facts)
    found = trace(run.store, 0)
    [part] = found["leases"][0]["parts"]
    assert (part["cost"]["failed_requests"], part["rows"][0]["tool_usage"][0]["calls"]) == (4, 3)
    json.dumps(found, allow_nan=False)
    text = shown(found)
    assert "scored in 2.00 s after 0.50 s · 4 requests failed · 1 cut off · 120 tokens discarded" in text
    assert "1.50 s · 3 tool calls, 1 failed · calculator 3×, 1 failed, 0.25 s · step 2×, 0.50 s" in text
    assert "1 realigned, 2 forked, 9 tokens of drift" in text
    assert 'assistant: → calculator {"expression": "1+1"}' in text and "\x1b[31m" not in text


@pytest.mark.parametrize(
    ("ordinal", "state"),
    [(3, "dropped"), (10, "dropped"), (12, "in_flight"), (13, "buffered"), (14, "returned"), (99, "new")],
)
def test_ordinals_in_any_state_have_a_life(store, ordinal, state):
    found = trace(store, ordinal)
    assert found["state"] == state
    json.dumps(found, allow_nan=False)
    assert state.replace("_", " ") in shown(found)


def test_a_tombstone_shows_its_cause(store):
    [lease] = trace(store, 3)["leases"]
    [row] = lease["parts"][0]["rows"]
    assert (row["status"], row["error"], row["tokens"]) == ("failed", f"RolloutFailed: {HOSTILE}", [])
    assert lease["decisions"][0]["reason"] == row["error"]


def test_a_sealed_lease_says_that_it_returned_the_ordinal(store):
    [lease] = trace(store, 14)["leases"]
    assert [(part["returned"], part["last"], part["rows"]) for part in lease["parts"]] == [(True, True, [])]


def test_rollouts_cannot_speak_to_the_terminal(store):
    text = shown(trace(store, 7, Names()))
    assert "\x1b[31m" not in text and "\u202e" not in text
    assert "[red]markup[/red]" in text and "‹U+001B›" in text


def test_a_part_that_was_collected_is_said_so(store):
    store.delete(layout.part(1, 2, 0))
    found = trace(store, 5)
    [lease] = found["leases"]
    assert (found["state"], lease["parts"]) == (
        "trained",
        [{"part": 0, "last": False, "returned": False, "collected": True, "cost": None, "rows": []}],
    )
    assert [decision["state"] for decision in lease["decisions"]] == ["trained", "trained"]
    assert "part 0: collected by gc, rollouts and tokens with it" in shown(found)


def test_a_lease_without_any_part_is_no_fault(store):
    store.delete(layout.part(1, 3, 0))
    [lease, *_] = trace(store, 7)["leases"]
    assert lease["parts"] == [] and "no part holds it: none has come, or gc collected it" in shown(trace(store, 7))


def long_run(root: Path, steps: int) -> ObjectStore:
    """Two prompts a step, each in a lease of its own; every third is returned once and waits for its second lease."""
    store = ObjectStore.open(str(root))
    run = SyntheticRun(store, steps=1000)
    run.claim()
    late = None
    for step in range(steps):
        fresh = [2 * step, 2 * step + 1]
        for ordinal in fresh:
            run.arrive(run.lease([ordinal]), {ordinal: [1, 0]}, last=True)
        if late is not None:
            run.arrive(run.lease([late]), {late: [0, 1]}, last=True)
        trained, late = [*fresh, *([] if late is None else [late])], None
        if step % 3 == 1 and step + 1 < steps:
            run.decide(returned={fresh[1]: "stale"})
            trained.remove(late := fresh[1])
        run.step(trained)
        if run.done % 10 == 0:
            run.checkpoint()
    return store


def test_every_prompt_of_a_long_run_is_found(tmp_path):
    store = long_run(tmp_path / "long", 24)
    for ordinal in range(48):
        leases = trace(store, ordinal)["leases"]
        twice = ordinal % 6 == 3 and ordinal < 46
        assert [[decision["state"] for decision in lease["decisions"]] for lease in leases] == (
            [["returned"], ["trained"]] if twice else [["trained"]]
        ), ordinal


def test_the_cost_does_not_grow_with_the_history(tmp_path, monkeypatch):
    """But for the search's first step, which halves what is left with each of its requests."""

    def requests(store: ObjectStore, ordinal: int) -> int:
        return requests_of(lambda: trace(store, ordinal), monkeypatch)

    short, long = long_run(tmp_path / "short", 20), long_run(tmp_path / "long", 60)
    for ordinal in (0, 20, 33):
        assert requests(long, ordinal) <= requests(short, ordinal) + 6
