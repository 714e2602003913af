"""The feed sees what is durable in the store, each part once, and knows where every ordinal is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_core.schedule.frontier import Frontier, OrdinalState
from grpo_core.training.feed import BufferedGroup, Lineage, PartCache
from grpo_core.training.step import FILLER, Place
from grpo_core.trajectory import VersionSpan
from storage import layout
from storage.attempts import Link
from storage.errors import DamagedShard
from storage.layout import PartName
from storage.trajectories import TrajectoryStore
from tests.grpo_core.training.parts import Run, group, tombstone


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.start(tmp_path / "store")


def test_leased_ordinals_are_in_flight_until_their_part_is_there(run: Run) -> None:
    lease = run.lease(0, 1, 2)
    assert run.feed.poll() and not run.feed.poll()
    assert run.feed.frontier.members(OrdinalState.IN_FLIGHT) == [0, 1, 2]
    run.arrive(lease, group(1))
    assert run.feed.poll() and not run.feed.poll()
    assert sorted(run.feed.groups) == run.feed.frontier.members(OrdinalState.BUFFERED) == [1]
    run.arrive(lease, group(0), group(2), last=True)
    assert run.feed.poll()
    assert sorted(run.feed.groups) == [0, 1, 2]
    assert not run.feed.poll()


def test_a_group_carries_rewards_versions_and_where_its_rows_are(run: Run) -> None:
    part = run.whole(group(11), group(4, versions=(1, 3), rewards=(None, 0.5)))
    run.feed.poll()
    found = run.feed.groups[4]
    assert (found.part, found.rows, found.rollouts, found.epoch, found.dataset_index) == (part, (2, 3), (0, 1), 0, 4)
    assert math.isnan(found.rewards[0]) and found.rewards[1] == 0.5
    assert (found.oldest_version, found.newest_version, found.failure) == (1, 3, None)
    (first, _) = run.rows(4)
    assert first.ids.tolist() == [4] * 5 and first.generated.tolist() == [False, False, True, True, True]
    assert first.logprobs.tolist() == [0.0, 0.0, -0.5, -0.5, -0.5]
    assert first.fresh(3).tolist() == [False, False, False, True, True]


def test_a_tombstone_is_a_group_with_a_failure(run: Run) -> None:
    run.whole(tombstone(0, "RewardError: broken"), group(1))
    run.feed.poll()
    assert run.feed.groups[0].failure == "RewardError: broken"
    assert run.feed.groups[1].failure is None


def test_a_group_without_a_generated_token_cannot_be_trained(run: Run) -> None:
    rows = group(0)
    for row in rows:
        row["version_spans"], row["loss_mask"] = [], [False] * 5
    run.whole(rows)
    run.feed.poll()
    assert run.feed.groups[0].failure == "no token was generated"


def test_a_group_of_which_nothing_could_be_scored_cannot_be_trained(run: Run) -> None:
    run.whole(group(0, rewards=(None, None)), group(1, rewards=(None, 1.0)))
    run.feed.poll()
    assert run.feed.groups[0].failure == "no rollout could be scored"
    assert run.feed.groups[1].failure is None


def test_a_sealed_lease_returns_what_is_missing(run: Run) -> None:
    lease = run.lease(0, 1, 2)
    run.arrive(lease, group(1))
    run.trajectories.seal(lease, (0, 1, 2))
    run.feed.poll()
    assert run.feed.frontier.members(OrdinalState.RETURNED) == [0, 2]
    again = run.lease(0, 2, failure_counts={0: 2})
    run.arrive(again, group(0), group(2), last=True)
    run.feed.poll()
    assert sorted(run.feed.groups) == [0, 1, 2]
    assert dict(run.feed.frontier.failure_counts) == {0: 2}


def test_a_seal_and_the_lease_of_what_it_returned_may_be_seen_at_once(run: Run) -> None:
    first = run.lease(0, 1)
    run.feed.poll()
    run.arrive(first, group(1))
    run.trajectories.seal(first, (0, 1))
    second = run.lease(0, 2)
    run.feed.poll()
    assert run.feed.frontier.members(OrdinalState.IN_FLIGHT) == [0, 2]
    run.arrive(second, group(0), group(2), last=True)
    run.feed.poll()
    assert sorted(run.feed.groups) == [0, 1, 2]


def test_a_lease_may_be_first_seen_together_with_the_one_that_follows_its_seal(run: Run) -> None:
    for _ in range(2):
        run.trajectories.seal(run.lease(0, 1), (0, 1))
    run.arrive(run.lease(1, 0), group(1), group(0), last=True)
    run.feed.poll()
    assert sorted(run.feed.groups) == run.feed.frontier.members(OrdinalState.BUFFERED) == [0, 1]


def test_parts_are_taken_without_a_gap(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing that runs while parts are written may show a later one and miss an earlier one."""
    lease = run.lease(0, 1)
    run.arrive(lease, group(0))
    run.arrive(lease, group(1), last=True)
    whole = type(run.trajectories).open_parts
    with monkeypatch.context() as torn:
        torn.setattr(type(run.trajectories), "open_parts", lambda self, leases: whole(self, leases)[1:])
        run.feed.poll()
    assert run.feed.groups == {}
    run.feed.poll()
    assert sorted(run.feed.groups) == [0, 1]


@pytest.mark.parametrize("rewards", [(1.0,), (0.0, 1.0, 0.5)])
def test_a_group_of_another_size_than_the_runs_is_a_failure(run: Run, rewards: tuple[float, ...]) -> None:
    run.whole(group(0, rewards=rewards), group(1))
    run.feed.poll()
    found = run.feed.groups[0]
    assert found.failure == "incomplete group" and len(found.rewards) == 2
    assert run.feed.groups[1].failure is None


def test_survivors_are_a_group_where_there_may_be_fewer(tmp_path: Path) -> None:
    run = Run.start(tmp_path / "few", least=1)
    rows = group(0, rewards=(1.0,))
    rows[0]["rollout"], rows[0]["engine"] = 1, "e0,e1"
    run.whole(rows, group(1))
    run.feed.poll()
    found = run.feed.groups[0]
    assert found.failure is None and found.rollouts == (1,) and found.engines == {"e0", "e1"}
    assert math.isnan(found.rewards[0]) and found.rewards[1] == 1.0


def test_a_group_that_lacks_a_rollout_in_the_middle_is_a_failure(run: Run) -> None:
    rows = group(0)
    rows[1]["rollout"] = 2
    run.whole(rows)
    run.feed.poll()
    assert run.feed.groups[0].failure == "incomplete group"


def test_weights_of_a_dead_branch_do_not_pass_for_living_ones_of_the_same_number(tmp_path: Path) -> None:
    Run.start(tmp_path)
    second = Run.start(tmp_path, parent=(1, 3))
    second.whole(
        group(0, attempt=1, versions=(3,)),
        group(1, attempt=1, versions=(3, 4)),
        group(2, attempt=2, versions=(4,)),
        group(3, attempt=7, versions=(0,)),
        tombstone(4),
    )
    second.feed.poll()
    assert {ordinal: each.candidate({}).foreign for ordinal, each in second.feed.groups.items()} == {
        0: False, 1: True, 2: False, 3: True, 4: False,
    }  # fmt: skip


def test_a_lineage_counts_versions_and_not_steps() -> None:
    lineage = Lineage.of([Link(1, 5), Link(3, None)], every_steps=2)
    assert [lineage.holds(VersionSpan(1, version, 0, 1)) for version in (2, 3)] == [True, False]
    assert lineage.holds(VersionSpan(3, 99, 0, 1)) and not lineage.holds(VersionSpan(2, 0, 0, 1))


def test_leases_of_other_attempts_are_not_ours(tmp_path: Path) -> None:
    Run.start(tmp_path).whole(group(0))
    later = Run.start(tmp_path, parent=None)
    assert later.attempt == 2
    assert not later.feed.poll()


def test_pinned_groups_are_taken_up_and_others_of_their_part_are_not(tmp_path: Path) -> None:
    first = Run.start(tmp_path)
    part = first.whole(group(0), group(1), group(2))
    second = Run.start(tmp_path, parent=None)
    second.feed.restore([part], [0, 2])
    assert sorted(second.feed.groups) == [0, 2]
    assert [row.ids[0] for row in second.rows(2)] == [2, 2]


def test_a_damaged_part_is_an_error(run: Run) -> None:
    part = run.whole(group(0))
    path = run.store.local_path(layout.part(part.attempt, part.lease, part.part))
    assert path is not None
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DamagedShard, match="lease-000000000"):
        run.feed.poll()


def test_the_cache_reads_parts_it_has_not_seen_and_forgets_those_not_kept(run: Run) -> None:
    part = run.whole(group(3), group(5))
    key = layout.part(part.attempt, part.lease, part.part)
    cache = PartCache(run.trajectories)
    assert [row.ids[0] for row in cache.rows([Place(key, 3), Place(key, 0)])] == [5, 3]
    run.store.delete(key)
    cache.keep([key])
    assert cache.rows([Place(key, 1)])[0].ids[0] == 3
    cache.keep([])
    with pytest.raises(Exception, match="lease-000000000"):
        cache.rows([Place(key, 1)])


def test_the_cache_decodes_only_what_makes_rows(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    part = run.whole(group(3))
    asked: list[Any] = []

    def read(name: PartName, columns: Any = None) -> Any:
        asked.append(set(columns))
        return TrajectoryStore.read_part(run.trajectories, name, columns)

    monkeypatch.setattr(run.trajectories, "read_part", read)
    PartCache(run.trajectories).rows([Place(layout.part(part.attempt, part.lease, part.part), 0)])
    assert asked == [{"token_ids", "loss_mask", "logprobs", "version_spans"}]


def scored(ordinal: int, *components: dict[str, float]) -> list[dict[str, Any]]:
    """A group whose rewards are the weighted sums of these, rollout by rollout."""
    rows = group(ordinal, rewards=[each["m:a"] + 2 * each["m:b"] for each in components])
    for row, each in zip(rows, components, strict=True):
        row["reward_components"] = list(each.items())
    return rows


SOURCES = {"rewards": {"functions": [{"function": "m:a"}, {"function": "m:b", "weight": 2.0}]}}


@pytest.mark.parametrize(
    ("recipe", "teaches"),
    [
        (SOURCES, [False, False, True]),
        (SOURCES | {"grpo": {"advantage_per_source": True}}, [False, True, True]),
        (SOURCES | {"grpo": {"reward_scaling": {"source_max": 0.1}}}, [False, False, False]),
    ],
)
def test_a_group_teaches_where_some_rollout_has_an_advantage(
    tmp_path: Path, recipe: dict[str, Any], teaches: list[bool]
) -> None:
    run = Run.start(tmp_path, recipe=recipe)
    run.whole(
        scored(0, {"m:a": 0.25, "m:b": 0.0}, {"m:a": 0.25, "m:b": 0.0}),
        scored(1, {"m:a": 1.0, "m:b": 0.0}, {"m:a": 0.5, "m:b": 0.25}),
        scored(2, {"m:a": 1.0, "m:b": 0.0}, {"m:a": 0.5, "m:b": 0.0}),
    )
    run.feed.poll()
    assert [run.feed.groups[ordinal].teaches for ordinal in range(3)] == teaches
    assert [candidate.zero_variance for candidate in run.feed.candidates({})] == [not each for each in teaches]


def test_a_discount_alone_teaches_and_what_gets_no_gradient_does_not(tmp_path: Path) -> None:
    shaping = {"max_response_length": 100, "overlong_buffer_length": 0, "truncated_coefficient": 0.5}
    run = Run.start(tmp_path, recipe={"grpo": {"overlong_filtering": True, "reward_shaping": shaping}})
    one, both = group(0, rewards=(1.0, 1.0)), group(1, rewards=(0.0, 1.0))
    for row in (one[1], *both):
        row["finish_reason"] = "length"
    run.whole(one, both)
    run.feed.poll()
    assert (run.feed.groups[0].teaches, run.feed.groups[1].teaches) == (True, False)


def test_a_filler_is_one_token_that_trains_nothing(run: Run) -> None:
    cache = PartCache(run.trajectories)
    cache.keep([])
    (row,) = cache.rows([FILLER])
    assert len(row.ids) == 1 and not row.generated.any() and not row.fresh(0).any()
    assert np.isfinite(row.logprobs).all()


def test_conservation_holds_at_every_poll(run: Run) -> None:
    leases = [run.lease(0, 1, 2, 3), run.lease(4, 5)]
    events = [
        lambda: run.arrive(leases[0], group(2), tombstone(0)),
        lambda: run.arrive(leases[1], group(5)),
        lambda: run.trajectories.seal(leases[0], (0, 1, 2, 3)),
        lambda: run.whole(group(1), group(3)),
        lambda: run.arrive(leases[1], group(4), last=True),
    ]
    run.feed.poll()
    for event in events:
        event()
        run.feed.poll()
        counts = run.feed.frontier.counts()
        assert counts.leased == run.feed.frontier.next_ordinal == 6
        assert sorted(run.feed.groups) == run.feed.frontier.members(OrdinalState.BUFFERED)
    assert sorted(run.feed.groups) == [0, 1, 2, 3, 4, 5]


def test_a_resumed_frontier_agrees_with_the_restored_groups(tmp_path: Path) -> None:
    first = Run.start(tmp_path)
    part = first.whole(group(0), group(1), group(2))
    first.feed.poll()
    first.feed.frontier.trained([1], 1)
    state = first.feed.frontier.checkpoint()
    second = Run.start(tmp_path, parent=(1, 1), frontier=Frontier.resume(state))
    second.feed.restore([part], state.buffered)
    assert sorted(second.feed.groups) == second.feed.frontier.members(OrdinalState.BUFFERED) == [0, 2]


def test_what_an_engine_sampled_after_it_failed_its_refit_is_not_believed() -> None:
    group = BufferedGroup(
        ordinal=3,
        part=PartName(1, 0, 0),
        rows=(0,),
        rollouts=(0,),
        rewards=(1.0,),
        oldest_version=4,
        newest_version=5,
        epoch=0,
        dataset_index=0,
        failure=None,
        foreign=False,
        engines=frozenset({"engine-0"}),
    )
    assert not group.candidate({}).foreign and not group.candidate({"engine-1": 5}).foreign
    assert not group.candidate({"engine-0": 6}).foreign, "what it sampled before the failed refit stays good"
    assert group.candidate({"engine-0": 5}).foreign
