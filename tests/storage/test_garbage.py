"""What can go goes, and nothing that anybody could still need: beside a living run, a resume, and a stopped writer."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from grpo_core.schedule.frontier import Frontier, FrontierState, OrdinalState
from storage import checkpoints, layout, weights
from storage.attempts import claim_next
from storage.checkpoints import Manifest, commit_manifest, committed, newest_valid, read_manifest
from storage.digests import FileDigest
from storage.errors import DamagedCheckpoint, Fenced
from storage.garbage import Garbage, Retention, collect, select, survey
from storage.layout import CheckpointName, PartName
from storage.leases import LeaseRecord, write_lease
from storage.objects import ObjectStore
from storage.trajectories import TrajectoryStore

Table = Callable[..., pa.Table]
KEEP = Retention(keep_last=2, keep_best=0, metric="reward_mean")
NOW = 4e9  # long after every object of a test was written
FILE = b"tensors"


class History:
    """Plays flow and trainer of one attempt at a time. `parts` maps a buffered ordinal to the part that holds it."""

    def __init__(self, store: ObjectStore, table: Table) -> None:
        self.store = store
        self.table = table

    def claim(self, parent: Manifest | None = None) -> None:
        name = None if parent is None else (parent.attempt, parent.step)
        claim = claim_next(self.store, parent=name, host="h", pid=1, pid_started_at=0.0, claimed_at=0.0)
        self.attempt, self.leases, self.open = claim.attempt, 0, dict[int, list[int]]()
        self.trajectories = TrajectoryStore(self.store, claim.attempt)
        self.step, self.frontier, self.parts = 0, Frontier(), dict[int, PartName]()
        if parent is not None:
            self.step, self.frontier = parent.step, Frontier.resume(FrontierState.from_json(parent.frontier))
            held = set(self.frontier.members(OrdinalState.BUFFERED))
            for part in parent.pinned:
                ordinals = self.trajectories.read_part(part)[0].ordinals  # as a resumed trainer does
                self.parts |= dict.fromkeys(held.intersection(ordinals), part)
            assert self.parts.keys() == held

    def lease(self, count: int) -> int:
        ordinals = self.frontier.lease(count)
        number, self.leases = self.leases, self.leases + 1
        write_lease(self.store, LeaseRecord(self.attempt, number, tuple(ordinals), 0.0, f"{self.attempt}.{self.step}"))
        self.open[number] = list(ordinals)
        return number

    def arrive(self, lease: int, count: int | None = None) -> None:
        """The next groups of a lease; its last part when none is left."""
        waiting = self.open[lease]
        arrived = waiting[:count]
        self.open[lease] = waiting[len(arrived) :]
        name = self.trajectories.append(lease, self.table(*arrived), last=not self.open[lease])
        assert name is not None
        self.frontier.buffered(arrived)
        self.parts |= dict.fromkeys(arrived, name)
        if not self.open[lease]:
            del self.open[lease]

    def generate(self, count: int) -> None:
        self.arrive(self.lease(count))

    def train(self, *ordinals: int) -> None:
        for ordinal in ordinals:
            self.store.size(key_of(self.parts.pop(ordinal)))  # a rank may read it only now
        self.step += 1
        self.frontier.trained(ordinals, self.step)

    def save(self, **metrics: float) -> Manifest:
        manifest = self.manifest(**metrics)
        self.store.put(layout.checkpoint(self.attempt, self.step) + "model.safetensors", FILE)
        commit_manifest(self.store, manifest)
        return manifest

    def manifest(self, **metrics: float) -> Manifest:
        digest = FileDigest(len(FILE), "0" * 64)
        state = self.frontier.checkpoint()
        pinned = tuple({self.parts[ordinal] for ordinal in state.buffered})
        files = {"model.safetensors": digest}
        return Manifest(self.attempt, self.step, self.step, files, state.to_json(), 0.0, pinned, metrics)


def key_of(part: PartName) -> str:
    return layout.part(part.attempt, part.lease, part.part)


def chosen(store: ObjectStore, *, now: float = NOW, keep: Retention = KEEP) -> list[Garbage]:
    contents = survey(store)
    return [] if contents is None else select(contents, keep, now=now)


def names(garbage: list[Garbage]) -> list[tuple[str, str, str]]:
    return [(item.kind, item.name, item.reason) for item in garbage]


def sweep(store: ObjectStore) -> None:
    contents = survey(store)
    assert contents is not None
    collect(store, select(contents, KEEP, now=NOW), attempt=contents.attempt)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore.open(str(tmp_path / "run"))


@pytest.fixture
def run(store: ObjectStore, shard_table: Table) -> History:
    history = History(store, shard_table)
    history.claim()
    return history


def test_a_lease_goes_when_all_its_ordinals_are_settled_in_the_oldest_kept_checkpoint(run: History) -> None:
    for _ in range(3):
        run.generate(2)
    run.train(0, 1)
    run.train(2)
    run.save()
    run.train(3, 4)
    run.save()
    assert names(chosen(run.store)) == [("parts", "1/0", "settled in checkpoint 1/2")]
    assert chosen(run.store, now=0.0), "what is settled needs no grace"


def test_a_lease_is_kept_whole_while_one_of_its_groups_is_open(run: History) -> None:
    lease = run.lease(3)
    run.arrive(lease, 2)
    run.arrive(lease)
    run.train(0, 1)
    run.save()
    assert run.store.list("trajectories/000001/000000/")[1:], "two parts, and the first holds settled ordinals only"
    assert chosen(run.store) == []


def test_a_lease_of_the_newest_attempt_waits_for_its_last_part(run: History) -> None:
    lease = run.lease(2)
    run.trajectories.append(lease, run.table(0, 1))
    run.frontier.buffered([0, 1])
    run.parts = dict.fromkeys([0, 1], PartName(1, lease, 0))
    run.train(0, 1)
    run.save()
    assert chosen(run.store) == []
    run.trajectories.seal(lease, [0, 1])
    assert names(chosen(run.store)) == [("parts", "1/0", "settled in checkpoint 1/1")]


def test_without_a_checkpoint_nothing_is_settled(run: History) -> None:
    run.generate(2)
    run.train(0, 1)
    assert chosen(run.store) == []
    assert survey(ObjectStore.open("memory://never-started")) is None


def test_what_a_dead_branch_wrote_goes_after_the_grace_time(run: History) -> None:
    run.generate(2)
    run.train(0)
    base = run.save()
    run.generate(3)
    run.train(1, 2)
    run.claim(base)
    assert names(chosen(run.store)) == [("parts", "1/1", "dead branch")]
    assert chosen(run.store, now=0.0) == []


def test_an_attempt_that_left_no_link_is_dead_altogether(run: History) -> None:
    run.generate(2)
    run.claim()
    run.generate(1)
    assert names(chosen(run.store)) == [("parts", "1/0", "dead branch")]


def test_parts_that_any_committed_checkpoint_pins_stay(run: History) -> None:
    """A dead branch's checkpoint is the newest one until the newest attempt has its own: a resume may choose it."""
    run.generate(2)
    run.train(0)
    base = run.save()
    run.generate(2)
    run.train(1)
    dead = run.save()
    run.claim(base)
    assert chosen(run.store) == []
    assert newest_valid(run.store, on_damaged=fail) == read_manifest(run.store, dead.attempt, dead.step)


def fail(name: CheckpointName, error: DamagedCheckpoint) -> None:
    raise AssertionError(f"{name} is damaged") from error


def ignore(name: CheckpointName, error: DamagedCheckpoint) -> None:
    pass


@pytest.fixture(autouse=True)
def sizes_are_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of these checkpoints have no digests; only that they are there counts here."""
    checked = checkpoints.check_files
    monkeypatch.setattr(
        checkpoints, "check_files", lambda *arguments, contents=True: checked(*arguments, contents=False)
    )


def test_a_checkpoint_that_commits_between_survey_and_deletion_keeps_what_it_pins(run: History) -> None:
    for _ in range(4):
        run.generate(2)
    run.train(0, 1)
    run.save()
    contents = survey(run.store)
    assert contents is not None
    garbage = select(contents, KEEP, now=NOW)
    run.train(2)
    late = run.save()
    collect(run.store, garbage, attempt=1)
    assert late.pinned and all(run.store.exists(key_of(part)) for part in late.pinned)
    assert not run.store.exists(layout.part(1, 0, 0))
    run.claim(newest_valid(run.store, on_damaged=fail))
    run.train(3, 4)


def test_a_resume_from_an_older_checkpoint_finds_its_groups(run: History) -> None:
    """The newest is damaged; the older one relies on groups that the newest has settled long ago."""
    for _ in range(3):
        run.generate(2)
    run.train(0, 1)
    run.save()
    run.train(2, 3)
    run.train(4)
    run.save()
    sweep(run.store)
    run.store.delete(layout.checkpoint(1, 3) + "model.safetensors")
    skipped: list[CheckpointName] = []
    older = newest_valid(run.store, on_damaged=lambda name, error: skipped.append(name))
    assert older is not None and (older.name, skipped) == (CheckpointName(1, 1), [CheckpointName(1, 3)])
    run.claim(older)
    run.train(2, 3)


def test_a_stopped_writer_that_commits_a_collected_branch_is_skipped(run: History) -> None:
    """It passed its fence before it was stopped, so its manifest comes long after its branch died."""
    run.generate(2)
    run.train(0)
    base = run.save()
    run.generate(2)
    run.train(1)
    late = run.manifest()
    run.store.put(layout.checkpoint(1, 2) + "model.safetensors", FILE)
    run.claim(base)
    sweep(run.store)
    run.store.put(layout.checkpoint(1, 2) + "model.safetensors", FILE)
    commit_manifest(run.store, late)
    skipped: list[str] = []
    found = newest_valid(run.store, on_damaged=lambda name, error: skipped.append(str(error)))
    assert found is not None and found.name == base.name
    assert "trajectories/000001/000000/lease-000000001.part-000.parquet" in skipped[0]


def test_a_new_attempt_ends_the_collection(run: History) -> None:
    run.generate(2)
    run.train(0, 1)
    base = run.save()
    garbage = chosen(run.store)
    run.claim(base)
    with pytest.raises(Fenced, match=r"Attempt 2 .* collect again"):
        collect(run.store, garbage, attempt=1)
    assert run.store.exists(layout.part(1, 0, 0))


def test_while_a_manifest_cannot_be_read_nothing_that_it_could_pin_goes(run: History) -> None:
    run.generate(2)
    run.train(0, 1)
    run.save()
    run.generate(1)
    run.train(2)
    run.save()
    assert names(chosen(run.store)) == [("parts", "1/0", "settled in checkpoint 1/1")]
    run.store.put(layout.manifest(1, 1), b"{")
    assert chosen(run.store) == []
    contents = survey(run.store)
    assert contents is not None and contents.unreadable == {CheckpointName(1, 1)}


def test_retention_keeps_the_newest_the_best_and_the_parent(run: History) -> None:
    saved = []
    for reward in (0.1, 0.9, 0.2, 0.3, 0.4):
        run.generate(1)
        run.train(run.frontier.frontier)
        saved.append(run.save(reward=reward))
    run.claim(saved[0])
    run.generate(1)
    run.train(1)
    run.save(reward=0.0)
    kept = Retention(keep_last=1, keep_best=0, metric="reward")
    dead = [("checkpoint", f"1/{step}", "dead branch") for step in (2, 3, 4, 5)]
    assert [each for each in names(chosen(run.store, keep=kept)) if each[0] == "checkpoint"] == dead
    assert [each for each in names(chosen(run.store, keep=kept, now=0.0)) if each[0] == "checkpoint"] == []


def test_best_checkpoints_of_the_living_chain_stay(run: History) -> None:
    for reward in (0.9, 0.1, 0.2):
        run.generate(1)
        run.train(run.frontier.frontier)
        run.save(reward=reward)
    keep = Retention(keep_last=1, keep_best=1, metric="reward")
    found = [each for each in names(chosen(run.store, keep=keep)) if each[0] == "checkpoint"]
    assert found == [("checkpoint", "1/2", "past retention")]


def test_a_checkpoint_that_lacks_a_file_replaces_no_older_one(run: History) -> None:
    for _ in range(3):
        run.generate(1)
        run.train(run.frontier.frontier)
        run.save()
    run.store.delete(layout.checkpoint(1, 3) + "model.safetensors")
    assert [each for each in names(chosen(run.store)) if each[0] == "checkpoint"] == []


def test_an_interrupted_save_goes_and_one_under_way_stays(run: History) -> None:
    for attempt, step in ((1, 1), (1, 3)):
        run.store.put(layout.checkpoint(attempt, step) + "model.safetensors", FILE)
    run.generate(1)
    run.step = 1
    run.train(0)
    run.save()
    assert [each for each in names(chosen(run.store)) if each[0] == "checkpoint"] == [
        ("checkpoint", "1/1", "interrupted save")
    ]
    run.claim(newest_valid(run.store, on_damaged=fail))
    sweep(run.store)
    assert run.store.directories("checkpoints/000001/") == ["checkpoints/000001/step-000000002/"]


def test_only_the_newest_weights_stay(run: History, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "model.safetensors").write_bytes(FILE)
    weights.publish(run.store, 1, 0, tmp_path / "files")
    run.claim()
    for version in (3, 4):
        weights.publish(run.store, 2, version, tmp_path / "files")
    run.store.put(layout.weights(2, 5) + "model.safetensors", FILE)
    assert names(chosen(run.store)) == [("weights", "1/0", "of an older attempt"), ("weights", "2/3", "superseded")]
    sweep(run.store)
    assert weights.published(run.store, 1) == [] and weights.published(run.store, 2) == [4]
    assert run.store.exists(layout.weights(2, 5) + "model.safetensors"), "it may be on its way"


def test_records_are_never_collected(run: History) -> None:
    run.generate(2)
    run.train(0, 1)
    base = run.save()
    run.generate(1)
    run.claim(base)
    run.generate(1)
    run.train(2)
    run.save()
    records = [key for prefix in ("attempts/", "leases/") for key in run.store.list(prefix, recursive=True)]
    sweep(run.store)
    assert run.store.list("trajectories/", recursive=True) == [layout.part(2, 0, 0)]
    assert records == [key for prefix in ("attempts/", "leases/") for key in run.store.list(prefix, recursive=True)]


def test_a_collection_that_was_cut_short_is_finished_by_the_next(run: History) -> None:
    lease = run.lease(3)
    for _ in range(3):
        run.arrive(lease, 1)
    run.train(0, 1, 2)
    run.save()
    (item,) = chosen(run.store)
    run.store.delete(item.keys[0])
    assert names(chosen(run.store)) == names([item])
    sweep(run.store)
    assert chosen(run.store) == []


def test_every_kind_of_store_tells_sizes_and_ages(open_store: Callable[[str], ObjectStore], shard_table: Table) -> None:
    for kind in ("memory", "s3", "s3-obstore"):
        run = History(open_store(kind), shard_table)
        run.claim()
        run.generate(1)
        run.claim()
        (item,) = chosen(run.store)
        assert item.bytes == sum(run.store.size(key) for key in item.keys) > 0
        sweep(run.store)
        assert run.store.list("trajectories/", recursive=True) == []


@pytest.mark.parametrize("seed", range(12))
def test_no_interleaving_loses_what_somebody_relies_on(seed: int, shard_table: Table) -> None:
    """Random lives of a run. Between the survey and the deletion of each collection the run goes on, saves and retains,
    and after it a resume from any committed checkpoint, and every step of the living attempt, find their groups."""
    draw = random.Random(seed)
    store = ObjectStore.open(f"memory://garbage-{seed}-{draw.random()}")
    run = History(store, shard_table)
    run.claim()

    def live(events: int) -> None:
        for _ in range(events):
            buffered = sorted(run.parts)
            act = draw.choice(("lease", "arrive", "arrive", "train", "train", "return", "drop", "save", "retain"))
            if act == "lease" and len(buffered) + sum(map(len, run.open.values())) < 12:
                run.lease(draw.randint(1, 3))
            elif act == "arrive" and run.open:
                run.arrive(draw.choice(sorted(run.open)), draw.randint(1, 2))
            elif act == "train" and len(buffered) > 1:
                run.train(*draw.sample(buffered, 2))
            elif act in ("return", "drop") and len(buffered) > 2:
                ordinal = draw.choice(buffered)
                del run.parts[ordinal]
                run.frontier.returned([ordinal]) if act == "return" else run.frontier.dropped([ordinal], "bad")
            elif act == "save" and run.step > newest_step(run):
                run.save()
            elif act == "retain":
                for name in committed(store)[: -draw.randint(1, 3)]:
                    if draw.random() < 0.5 and name != parent:
                        checkpoints.delete(store, name.attempt, name.step)

    parent: CheckpointName | None = None
    collected = 0
    for _ in range(6):
        live(40)
        contents = survey(store)
        assert contents is not None
        garbage = select(contents, KEEP, now=NOW)
        live(draw.randint(0, 20))
        collect(store, garbage, attempt=run.attempt)
        collected += len(garbage)
        live(5)
        for name in committed(store):
            for part in read_manifest(store, name.attempt, name.step).pinned:
                assert store.exists(key_of(part)), f"{name} lost {part}"
        if draw.random() < 0.6 and (found := committed(store)):
            parent = draw.choice(found[-2:])
            run.claim(read_manifest(store, parent.attempt, parent.step))
    assert collected, "the test would show nothing"


def newest_step(run: History) -> int:
    return max((name.step for name in committed(run.store) if name.attempt == run.attempt), default=0)
