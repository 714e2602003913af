from collections.abc import Callable
from typing import Any

import duckdb
import pytest

from storage import layout, schema
from storage.attempts import Fence, claim_next
from storage.errors import DamagedShard, Fenced
from storage.layout import LedgerName
from storage.ledger import (
    LedgerWriter,
    Totals,
    ledger_names,
    ledger_rows,
    newest_footer,
    read_ledger,
    read_ledger_footer,
)
from storage.objects import ObjectStore

OWNER: dict[str, Any] = {"host": "h", "pid": 7, "pid_started_at": 1.5, "claimed_at": 2.5}


def trained(ordinal: int, **changes: Any) -> dict[str, Any]:
    row = {
        "ordinal": ordinal, "state": "trained", "lease_attempt": 1, "lease": 0, "part": 0, "version_min": 1,
        "version_max": 2, "lag_mean": 0.5, "lag_max": 1, "reward_mean": 0.5, "rewards": [0.0, 1.0],
        "advantages": [-1.0, 1.0], "tokens_generated": 10, "tokens_trained": 8, "tokens_masked": 2,
        "dataset_index": ordinal, "epoch": 0,
    }  # fmt: skip
    return row | changes


def gone(ordinal: int, state: str, reason: str) -> dict[str, Any]:
    return {"ordinal": ordinal, "state": state, "reason": reason, "tokens_generated": 5}


def write(writer: LedgerWriter, step: int, totals: Totals, *ordinals: int) -> Totals:
    rows = ledger_rows(trained(ordinal) for ordinal in ordinals)
    totals = totals.add(rows)
    writer.write_step(step, rows, totals, {})
    return totals


def test_a_step_is_read_back_with_its_totals_and_metrics(store: ObjectStore) -> None:
    claim_next(store, parent=None, **OWNER)
    rows = ledger_rows([trained(1), trained(2, trainer_logprobs=[[-1.0], [-2.0, -3.0]])])
    totals = Totals().add(rows, {0: 8, 1: 8})
    name = LedgerWriter(store, 1).write_step(5, rows, totals, {"loss": 0.25, "ratio": float("nan")})
    footer = read_ledger_footer(store, name)
    assert (footer.totals, footer.metrics) == (totals, {"loss": 0.25, "ratio": None})
    table = read_ledger(store)
    assert table["ordinal"].to_pylist() == [1, 2]
    assert table["attempt"].to_pylist() == [1, 1] and table["step"].to_pylist() == [5, 5]
    assert table["trainer_logprobs"].to_pylist() == [None, [[-1.0], [-2.0, -3.0]]]


def test_totals_add_up_by_outcome() -> None:
    rows = [trained(1, reward_mean=0.25), gone(2, "dropped", "zero variance"), gone(3, "returned", "stale")]
    totals = Totals().add(ledger_rows(rows), {0: 4, 2: 4})
    totals = totals.add(ledger_rows([trained(3, reward_mean=0.75), gone(4, "dropped", "zero variance")]), {1: 8})
    totals = totals.add(ledger_rows([trained(5, reward_mean=0.5), trained(6, reward_mean=float("nan"))]))
    assert (totals.trained, totals.returned, dict(totals.dropped)) == (4, 1, {"zero variance": 2})
    assert (totals.reward_first, totals.reward_last, totals.reward_best) == (0.25, 0.5, 0.75)
    assert (totals.tokens_generated, totals.tokens_trained, totals.tokens_masked) == (55, 32, 8)
    assert (totals.lag_mean, totals.lag(0.5), totals.lag(0.95), totals.lag(1.0)) == (1.0, 1, 2, 2)


def test_totals_of_nothing_have_no_rewards_and_no_lag() -> None:
    assert Totals().add(ledger_rows([])) == Totals()
    assert Totals().lag(0.95) is None and Totals().lag_mean is None


def test_drops_are_numbered_within_their_step(store: ObjectStore) -> None:
    claim_next(store, parent=None, **OWNER)
    writer = LedgerWriter(store, 1)
    rows = ledger_rows([gone(1, "dropped", "stale")])
    names = [writer.write_drops(step, rows, Totals()) for step in (3, 3, 4)]
    assert names == [LedgerName(1, 3, 0), LedgerName(1, 3, 1), LedgerName(1, 4, 0)]
    assert ledger_names(store) == names


def test_two_trainers_of_one_attempt_cannot_both_write_a_step(store: ObjectStore) -> None:
    rows = ledger_rows([trained(1)])
    LedgerWriter(store, 1).write_step(1, rows, Totals(), {})
    with pytest.raises(Fenced, match="step-000000001"):
        LedgerWriter(store, 1).write_step(1, rows, Totals(), {})


def test_a_lost_answer_of_a_step_is_recognised(local_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    create = ObjectStore.put_if_absent
    monkeypatch.setattr(ObjectStore, "put_if_absent", lambda *arguments: create(*arguments) and False)
    assert LedgerWriter(local_store, 1).write_step(1, ledger_rows([trained(1)]), Totals(), {}) == LedgerName(1, 1)


def test_a_fenced_trainer_records_nothing(local_store: ObjectStore) -> None:
    writer = LedgerWriter(local_store, 1, fence=Fence(local_store, 1).check)
    for _ in range(2):
        claim_next(local_store, parent=None, **OWNER)
    with pytest.raises(Fenced):
        writer.write_step(1, ledger_rows([trained(1)]), Totals(), {})
    assert ledger_names(local_store, all_attempts=True) == []


def test_only_the_living_history_is_read(local_store: ObjectStore) -> None:
    claim_next(local_store, parent=None, **OWNER)
    first = LedgerWriter(local_store, 1)
    totals = [write(first, step, Totals(trained=step - 1), step) for step in (1, 2, 3)]
    first.write_drops(4, ledger_rows([gone(9, "dropped", "stale")]), totals[-1])
    claim_next(local_store, parent=(1, 2), **OWNER)
    assert newest_footer(local_store) == read_ledger_footer(local_store, LedgerName(1, 2))
    write(LedgerWriter(local_store, 2), 3, totals[1], 30)
    assert read_ledger(local_store)["ordinal"].to_pylist() == [1, 2, 30]
    assert read_ledger(local_store, all_attempts=True)["ordinal"].to_pylist() == [1, 2, 3, 9, 30]
    newest = newest_footer(local_store)
    assert newest is not None and newest.name == LedgerName(2, 3) and newest.totals.trained == 3


def test_the_newest_footer_is_found_across_directories(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert newest_footer(store) is None
    claim_next(store, parent=None, **OWNER)
    assert newest_footer(store) is None
    writer = LedgerWriter(store, 1)
    for step in (998, 1000, 1001):
        write(writer, step, Totals(), step)
    writer.write_drops(1002, ledger_rows([]), Totals(trained=7))
    newest, newest_step = newest_footer(store), newest_footer(store, steps_only=True)
    assert newest is not None and newest.name == LedgerName(1, 1002, 0) and newest.totals.trained == 7
    assert newest_step is not None and newest_step.name == LedgerName(1, 1001)
    claim_next(store, parent=(1, 999), **OWNER)
    resumed = newest_footer(store)
    assert resumed is not None and resumed.name == LedgerName(1, 998)


def test_a_shard_is_not_a_ledger_file(local_store: ObjectStore, shard_table: Callable[..., Any]) -> None:
    local_store.put(layout.ledger_step(1, 1), schema.encode(shard_table(1), schema.SHARD, {}))
    with pytest.raises(DamagedShard, match="not a ledger file"):
        read_ledger_footer(local_store, LedgerName(1, 1))


def test_users_query_the_ledger_without_our_code(local_store: ObjectStore) -> None:
    writer = LedgerWriter(local_store, 1)
    write(writer, 1, Totals(), 1, 2)
    writer.write_drops(2, ledger_rows([gone(3, "dropped", "stale")]), Totals())
    root = local_store.local_path(layout.ledger_prefix())
    query = f"SELECT state, count(*), max(lag_max) FROM '{root}/**/*.parquet' GROUP BY state ORDER BY state"
    assert duckdb.connect().execute(query).fetchall() == [("dropped", 1, None), ("trained", 2, 1)]
