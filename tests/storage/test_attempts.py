import threading
from typing import Any

import pytest

from storage import layout
from storage.attempts import Fence, Link, attempt_numbers, claim_next, living_chain, newest, read_attempt
from storage.errors import DamagedRecord, Fenced
from storage.objects import ObjectStore
from storage.records import encode_record

OWNER: dict[str, Any] = {"host": "h", "pid": 7, "pid_started_at": 1.5, "claimed_at": 2.5}


def test_attempts_count_from_one_and_are_read_back(store: ObjectStore) -> None:
    assert newest(store) is None
    first = claim_next(store, parent=None, **OWNER)
    second = claim_next(store, parent=(1, 10), config_changes={"grpo.max_num_steps": [10, 20]}, **OWNER)
    assert (first.attempt, second.attempt) == (1, 2)
    assert newest(store) == second == read_attempt(store, 2)


def test_progress_hints_do_not_disturb_the_numbering(store: ObjectStore) -> None:
    claim_next(store, parent=None, **OWNER)
    store.put(layout.progress(9, "trainer"), b"{}")
    assert attempt_numbers(store) == [1]


def test_racing_claims_get_different_numbers(store: ObjectStore) -> None:
    claims = []
    threads = [
        threading.Thread(target=lambda: claims.append(claim_next(store, parent=None, **OWNER))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(claim.attempt for claim in claims) == [1, 2, 3, 4]


def test_a_newer_attempt_fences_the_older(store: ObjectStore) -> None:
    fence = Fence(store, claim_next(store, parent=None, **OWNER).attempt)
    fence.check()
    newer = Fence(store, claim_next(store, parent=None, **OWNER).attempt)
    newer.check()
    with pytest.raises(Fenced, match="Attempt 1"):
        fence.check()


def test_the_living_chain_follows_parents_and_leaves_dead_branches_out(local_store: ObjectStore) -> None:
    assert living_chain(local_store) == []
    for parent in (None, (1, 10), (1, 8), (3, 15), (4, 15)):
        claim_next(local_store, parent=parent, **OWNER)
    chain = living_chain(local_store)
    assert chain == [Link(1, 8), Link(3, 15), Link(4, 15), Link(5, None)]
    assert Link(1, 8).contains(1, 8) and not Link(1, 8).contains(1, 9) and not Link(1, 8).contains(2, 1)
    assert Link(5, None).contains(5, 10**6)


def test_a_new_start_from_initial_weights_ends_the_chain(local_store: ObjectStore) -> None:
    for parent in (None, (1, 10), None):
        claim_next(local_store, parent=parent, **OWNER)
    assert living_chain(local_store) == [Link(3, None)]


@pytest.mark.parametrize("parent", [(1, 3), (2, 3), (0, 3)])
def test_a_parent_must_be_an_older_attempt(local_store: ObjectStore, parent: tuple[int, int]) -> None:
    with pytest.raises(DamagedRecord, match="parent"):
        claim_next(local_store, parent=parent, **OWNER)


def test_a_record_of_something_else_is_no_claim(local_store: ObjectStore) -> None:
    local_store.put(layout.attempt(1), encode_record({"attempt": 1, "parent": None}))
    with pytest.raises(DamagedRecord, match="000001"):
        read_attempt(local_store, 1)
