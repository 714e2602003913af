"""Sequences end when the speed of their engine says so, and every token has the version it was made with."""

from __future__ import annotations

import pytest

from grpo_core.schedule.pool_model import Engine, Group, Pool, PoolModel


def group(*lengths: float, ordinal: int = 0) -> Group:
    return Group(ordinal, 0, 0, 1, lengths, fails=False, zero_variance=False)


def finish_all(engine: Engine) -> dict[int, float]:
    """Run an engine dry; ordinal → when its group was complete."""
    finished = {}
    while (due := engine.due()) is not None:
        engine.advance(due)
        finished |= {each.ordinal: due for each in engine.finish()}
    return finished


def test_a_group_is_complete_with_its_longest_member() -> None:
    engine = Engine(PoolModel(1, 8, 10.0), 0)
    engine.submit(group(10, 40, 25))
    assert finish_all(engine) == {0: 4.0}
    assert engine.generated == 75


def test_more_sequences_than_slots_wait_for_one() -> None:
    engine = Engine(PoolModel(1, 2, 10.0), 0)
    for ordinal, length in enumerate((20, 40, 10)):
        engine.submit(group(length, ordinal=ordinal))
    assert finish_all(engine) == {0: 2.0, 2: 3.0, 1: 4.0}


def test_beyond_the_knee_all_sequences_share_the_engine() -> None:
    model = PoolModel(1, 8, tokens_per_second=10.0, most_tokens_per_second=20.0)
    engine = Engine(model, 0)
    for ordinal, length in enumerate((10, 10, 10, 30)):
        engine.submit(group(length, ordinal=ordinal))
    # Four share 20 tokens per second until 10 tokens each are made, after 2 s; then the last one has its own speed.
    assert finish_all(engine) == {0: 2.0, 1: 2.0, 2: 2.0, 3: 4.0}
    assert (model.engine_peak, PoolModel(3, 8, 10.0).peak) == (20.0, 240.0)


def test_tokens_are_split_at_the_refits_that_happened_meanwhile() -> None:
    engine = Engine(PoolModel(1, 2, 10.0), 4)
    early, late = group(40, ordinal=0), group(20, ordinal=1)
    engine.submit(early)
    for at, version in ((1.0, 5), (3.0, 6)):
        engine.advance(at)
        engine.refit(version)
        if version == 5:
            engine.submit(late)
    finish_all(engine)
    assert early.tokens == {4: 10, 5: 20, 6: 10} and (early.oldest_version, early.newest_version) == (4, 6)
    assert late.tokens == {5: 20}


def test_a_paused_engine_makes_nothing() -> None:
    engine = Engine(PoolModel(1, 2, 10.0), 0)
    engine.submit(group(40))
    engine.advance(1.0)
    engine.paused = True
    assert engine.due() is None
    engine.advance(6.0)
    engine.paused = False
    assert finish_all(engine) == {0: 9.0}


def test_groups_go_to_the_engine_with_the_least_to_do() -> None:
    pool = Pool(PoolModel(2, 8, 10.0))
    groups = [group(10, 10, 10), group(10), group(10), group(10)]
    engines = [pool.submit(each, 0.0) for each in groups]
    first, second = pool.engines
    assert engines == [first, second, second, second]
    assert pool.on(second) == groups[1:]


def test_what_a_withdrawn_group_had_got_is_known_and_its_places_are_free() -> None:
    pool = Pool(PoolModel(1, 2, 10.0))
    lost, kept = group(10, 60, ordinal=0), group(30, ordinal=1)
    for each in (lost, kept):
        pool.submit(each, 0.0)
    engine = pool.engines[0]
    engine.advance(1.0)
    assert engine.finish() == []
    assert lost.generated == 10
    tokens, touched = pool.withdraw([lost], 2.0)
    assert (tokens, touched) == (20, {engine})
    assert finish_all(engine) == {1: 4.0}
    assert engine.generated == 10 + 20 + 30


@pytest.mark.parametrize("held_by", ["death", "drain"])
def test_groups_wait_outside_while_no_engine_takes_them(held_by: str) -> None:
    pool = Pool(PoolModel(1, 2, 10.0))
    pool.engines[0].alive = held_by != "death"
    pool.draining = held_by == "drain"
    waiting = group(10)
    assert pool.submit(waiting, 0.0) is None and pool.idle
    assert pool.release() == [waiting] and pool.release() == []
