"""What `forebay status` says, against the frontier of a run that was played event by event."""

import io
import json
import random
import time
from pathlib import Path

import pytest
from rich.console import Console

from flows.run import RunRefused
from flows.views.standing import recorded_run, standing
from flows.views.status import render_status, status
from grpo_core.schedule.frontier import OrdinalState
from storage import layout
from storage.objects import ObjectStore
from tests.flows.synthetic_run import SyntheticRun, small_run

KEYS = (
    "run_id", "state", "attempt", "step", "version", "frontier", "cut", "leased", "trained", "buffered", "in_flight", "dropped", "reward", "lag",
    "tokens", "tokens_per_second", "eta_seconds", "evaluation",
)  # fmt: skip
OPEN = (OrdinalState.BUFFERED, OrdinalState.IN_FLIGHT, OrdinalState.RETURNED)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore.open(str(tmp_path / "synthetic"))


def test_every_promised_key_is_there_and_is_json(store):
    small_run(store)
    values = status(store)
    assert tuple(values) == KEYS
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert set(values["reward"]) == {"first", "last", "best"}
    assert set(values["lag"]) == {"mean", "p95", "max"}
    assert set(values["tokens"]) == {"generated", "trained", "masked"}


def test_ordinals_are_counted_where_they_are(store):
    run = small_run(store)
    values = status(store)
    assert (values["step"], values["version"], values["attempt"]) == (5, 5, 2)
    assert (values["frontier"], values["cut"]) == (12, 7)
    assert (values["trained"], values["buffered"], values["in_flight"]) == (10, 1, 1)
    assert sum(values["dropped"].values()) == 2
    assert values["leased"] == values["trained"] + values["buffered"] + values["in_flight"] + sum(
        values["dropped"].values()
    )
    assert values["dropped"] == dict(run.totals.dropped)
    assert values["trained"] == run.totals.trained


def test_rewards_lags_and_tokens_are_those_of_the_living_history(store):
    run = small_run(store)
    values = status(store)
    assert values["reward"] == {"first": 0.25, "last": 0.75, "best": 0.75}
    assert values["lag"] == {"mean": run.totals.lag_mean, "p95": run.totals.lag(0.95), "max": 1}
    assert values["tokens"]["trained"] == run.totals.tokens_trained
    # Each step took 0.5 s of waiting, 1 s of training and 0.5 s of refit; attempt 2 trained steps 3 to 5.
    before, _ = run.saved[1, 2]
    assert values["tokens_per_second"] == pytest.approx((run.totals.tokens_trained - before.tokens_trained) / 6.0)


def test_a_run_without_an_attempt_is_new(store):
    SyntheticRun(store)
    values = status(store)
    assert (values["state"], values["attempt"], values["step"], values["leased"], values["frontier"]) == (
        "new",
        0,
        0,
        0,
        0,
    )
    assert values["reward"]["last"] is None and values["tokens_per_second"] is None


def test_an_attempt_that_nothing_was_heard_of_is_stopped(store):
    small_run(store)
    values = status(store)
    assert (values["state"], values["eta_seconds"]) == ("stopped", None)


def test_a_fresh_sign_of_life_on_another_host_makes_it_running(store):
    run = small_run(store)
    store.put(layout.progress(run.attempt, "flow"), json.dumps({"at": time.time()}).encode())
    values = status(store)
    assert values["state"] == "running"
    assert values["eta_seconds"] == pytest.approx(3 * 2.0)


def test_the_process_that_claimed_the_attempt_knows_that_it_runs(store):
    SyntheticRun(store).claim_here()
    assert status(store)["state"] == "running"


def test_the_newest_evaluation_of_the_living_history_is_told(store):
    run = small_run(store)
    run.attempt = 1  # attempt 1 is dead from step 3 on
    run.evaluate(9, sampled=[0, 0])
    assert status(store)["evaluation"] == {
        "version": 4, "step": 4, "scores": {"sampled": 0.75, "greedy": 1.0, "pass@1": 0.75}, "version_purity": None, "due_version": None,
    }  # fmt: skip


def test_the_last_checkpoint_and_evaluation_make_it_finished(store):
    run = SyntheticRun(store, steps=1)
    run.claim()
    run.arrive(run.lease([0, 1]), {0: [1, 0], 1: [0, 1]}, last=True)
    run.step([0, 1])
    run.checkpoint()
    assert status(store)["state"] == "stopped"
    run.evaluate(1, sampled=[1])
    values = status(store)
    assert (values["state"], values["eta_seconds"], values["cut"]) == ("finished", 0.0, 2)


def test_a_store_without_a_run_is_refused(store):
    with pytest.raises(RunRefused, match="no run"):
        status(store)


@pytest.mark.parametrize("seed", range(8))
def test_the_frontier_is_rebuilt_exactly_whatever_happened(tmp_path, seed):
    """A random life of several attempts: after each event, the rebuilt frontier is the one that followed along."""
    store = ObjectStore.open(str(tmp_path / "run"))
    chance = random.Random(seed)
    run = SyntheticRun(store, steps=1000, prompts_per_step=2)
    run.claim()
    leases: dict[int, list[int]] = {}
    saved = None
    for _ in range(60):
        counts = run.frontier.counts()
        room = 6 - counts.buffered - counts.in_flight
        buffered = run.frontier.members(OrdinalState.BUFFERED)
        choice = chance.random()
        if choice < 0.3 and room > 0:
            wanted = chance.randint(1, room)
            returned = run.frontier.members(OrdinalState.RETURNED)[:wanted]
            chosen = returned + list(
                range(run.frontier.next_ordinal, run.frontier.next_ordinal + wanted - len(returned))
            )
            leases[run.lease(chosen)] = chosen
        elif choice < 0.6 and leases:
            number = chance.choice(sorted(leases))
            some = chance.sample(leases[number], chance.randint(1, len(leases[number])))
            leases[number] = [ordinal for ordinal in leases[number] if ordinal not in some]
            if chance.random() < 0.2:
                run.seal(number, some + leases.pop(number))
            else:
                run.arrive(number, {ordinal: [1, 0] for ordinal in some}, last=not leases[number])
                if not leases[number]:
                    del leases[number]
        elif choice < 0.7 and buffered:
            gone = chance.sample(buffered, 1)
            run.decide(**{chance.choice(["dropped", "returned"]): dict.fromkeys(gone, "why")})
        elif choice < 0.9 and len(buffered) >= 2:
            run.step(sorted(buffered)[:2])
            if chance.random() < 0.5:
                run.checkpoint()
                saved = (run.attempt, run.done)
        elif choice > 0.95 and saved is not None:
            run.claim(saved)
            leases = {}
        found = standing(store, recorded_run(store)).frontier
        assert found.counts() == run.frontier.counts()
        assert [found.members(state) for state in OPEN] == [run.frontier.members(state) for state in OPEN]
        assert found.frontier == run.frontier.frontier


def test_the_cost_does_not_grow_with_the_history(tmp_path, monkeypatch):
    def requests(steps: int) -> int:
        store = ObjectStore.open(str(tmp_path / f"run-{steps}"))
        run = SyntheticRun(store, steps=1000)
        run.claim()
        for step in range(steps):
            run.arrive(run.lease([2 * step, 2 * step + 1]), {2 * step: [1, 0], 2 * step + 1: [0, 1]}, last=True)
            run.step([2 * step, 2 * step + 1])
            if run.done % 10 == 0:
                run.checkpoint()
                for directory in store.directories("checkpoints/000001/")[:-2]:
                    store.delete_prefix(directory)  # retention keeps two
        count = 0
        call = ObjectStore._call

        def counted(self, key, action):
            nonlocal count
            count += 1
            return call(self, key, action)

        with monkeypatch.context() as patch:
            patch.setattr(ObjectStore, "_call", counted)
            assert status(store)["trained"] == 2 * steps
        return count

    assert requests(60) <= requests(30)


def test_reasons_cannot_speak_to_the_terminal(store):
    small_run(store)
    target = io.StringIO()
    Console(file=target, width=200, force_terminal=True, color_system=None).print(render_status(status(store)))
    assert "\x1b[31m" not in target.getvalue() and "\u202e" not in target.getvalue()
    assert "[red]markup[/red]" in target.getvalue()
