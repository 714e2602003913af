"""What `forebay ledger` says about every ordinal."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from flows.views.history import COLUMNS, json_lines, ledger_lines, render_ledger
from storage.objects import ObjectStore
from tests.flows.synthetic_run import SyntheticRun, small_run


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore.open(str(tmp_path / "synthetic"))


def test_each_ordinal_appears_exactly_once_in_its_newest_state(store):
    small_run(store)
    rows = ledger_lines(store)
    assert [row["ordinal"] for row in rows] == list(range(15))
    assert all(tuple(row) == COLUMNS for row in rows)
    states = {row["ordinal"]: row["state"] for row in rows}
    assert [o for o, state in states.items() if state == "trained"] == [0, 1, 2, 4, 5, 6, 7, 8, 9, 11]
    assert [o for o, state in states.items() if state == "dropped"] == [3, 10]
    assert (states[12], states[13], states[14]) == ("in_flight", "buffered", "returned")


def test_a_group_of_the_dead_branch_is_trained_as_the_living_one_was(store):
    small_run(store)
    rows = {row["ordinal"]: row for row in ledger_lines(store)}
    assert (rows[6]["step"], rows[6]["lease"], rows[6]["reward_mean"], rows[6]["lag_max"]) == (3, 0, 0.5, 0)
    assert (rows[5]["step"], rows[5]["lag_max"]) == (3, 1)
    # Returned as stale at step 3, leased again, and trained.
    assert (rows[7]["step"], rows[7]["lease"], rows[7]["version_min"], rows[7]["reason"]) == (5, 2, 4, None)


def test_open_ordinals_say_what_is_known_of_them(store):
    small_run(store)
    rows = {row["ordinal"]: row for row in ledger_lines(store)}
    assert (rows[13]["version_min"], rows[13]["version_max"], rows[13]["reward_mean"], rows[13]["step"]) == (
        5,
        5,
        0.5,
        None,
    )
    assert (rows[12]["lease"], rows[12]["version_min"]) == (3, None)
    assert (rows[14]["lease"], rows[14]["reason"]) == (4, "expired")


def test_dead_branches_are_shown_only_when_asked_for(store):
    small_run(store)
    rows = ledger_lines(store, all_attempts=True)
    dead = [row for row in rows if not row["living"]]
    assert [(row["attempt"], row["ordinal"], row["step"], row["reward_mean"]) for row in dead] == [
        (1, 5, 3, 0.5),
        (1, 6, 3, 1.0),
    ]
    living = [row for row in rows if row["living"]]
    assert [row["ordinal"] for row in living] == list(range(15))
    assert {row["ordinal"]: row["attempt"] for row in living}[6] == 2


def test_what_a_dead_attempt_had_in_flight_is_returned_until_it_is_leased_again(store):
    run = SyntheticRun(store)
    run.claim()
    run.arrive(run.lease([0, 1]), {0: [1, 0], 1: [0, 1]}, last=True)
    run.lease([2, 3])
    run.step([0, 1])
    run.checkpoint()
    run.claim((1, 1))
    assert [(row["state"], row["reason"]) for row in ledger_lines(store)[2:]] == [("returned", "attempt 1 ended")] * 2
    run.lease([2, 3])
    assert [row["state"] for row in ledger_lines(store)[2:]] == ["in_flight"] * 2


def test_json_lines_are_one_object_per_ordinal(store):
    small_run(store)
    parsed = [json.loads(line) for line in json_lines(ledger_lines(store))]
    assert parsed == ledger_lines(store)


@pytest.mark.parametrize("all_attempts", [False, True])
def test_the_table_shows_every_line_and_obeys_no_text(store, all_attempts):
    small_run(store)
    target = io.StringIO()
    rows = ledger_lines(store, all_attempts=all_attempts)
    Console(file=target, width=240, force_terminal=True, color_system=None).print(render_ledger(rows))
    text = target.getvalue()
    assert "\x1b[31m" not in text and "\u202e" not in text and "[red]markup[/red]" in text
    assert len(text.splitlines()) == len(rows) + 1
    assert ("attempt" in text.splitlines()[0]) == all_attempts
