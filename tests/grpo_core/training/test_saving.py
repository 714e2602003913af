"""A checkpoint is the moment of its copy, whatever runs beside its writing, and a save that fails says so at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from grpo_core.config import CheckpointingConfig, RunConfig
from grpo_core.recipe import parse
from grpo_core.seeds import derived_seed
from grpo_core.training import checkpoint, saving
from grpo_core.training.commands import Commands, Idle
from grpo_core.training.feed import PartCache
from grpo_core.training.loop import Rank, follow
from grpo_core.training.saving import SaveFailed, retain
from storage import layout, schema
from storage.checkpoints import Manifest, commit_manifest, committed, read_manifest, verify
from storage.errors import Fenced, StoreUnavailable
from storage.layout import CheckpointName
from storage.objects import ObjectStore
from storage.trajectories import TrajectoryStore
from tests.grpo_core import tiny
from tests.grpo_core.training import ranks, saves
from tests.grpo_core.training.parts import Run
from tests.grpo_core.training.saves import Learner, save_of, saving_of


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("policy") / "tiny", tie_word_embeddings=True)


def tensors_in(directory: Path) -> dict[str, torch.Tensor]:
    return {f"{path.name}/{name}": tensor for path in directory.iterdir() if path.suffix == ".safetensors"
            for name, tensor in load_file(path).items()}  # fmt: skip


@pytest.mark.parametrize("world", [1, 2])
def test_checkpoint_written_behind_later_steps_is_bit_for_bit_that_of_its_copy(
    policy: Path, tmp_path: Path, world: int
) -> None:
    store = Run.start(tmp_path / "store").store
    ranks.run(world, saves.save_behind_steps, policy, str(tmp_path / "store"), tmp_path)
    assert committed(store) == [CheckpointName(1, 2), CheckpointName(1, 4)]
    for step in (2, 4):
        manifest = verify(store, 1, step)
        assert manifest.frontier == {"cut": step} and len(manifest.extra["random_states"]) == world
        local = store.local_path(layout.checkpoint(1, step))
        assert local is not None
        ours, expected = tensors_in(local), tensors_in(tmp_path / str(step))
        assert ours.keys() == expected.keys()
        assert [name for name, tensor in ours.items() if not torch.equal(tensor, expected[name])] == []


@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote"])
def test_full_disk_of_one_rank_fails_all_with_its_cause_and_leaves_no_files(
    policy: Path, tmp_path: Path, remote: bool
) -> None:
    store = Run.start(tmp_path / "store").store
    second = store.local_path(layout.checkpoint(1, 2))
    assert second is not None
    if not remote:
        second.mkdir(parents=True)
        (second / "shard-00002-model-00001-of-00001.safetensors").symlink_to("/dev/full")
    answers = ranks.run(2, saves.save_to_a_full_disk, policy, str(tmp_path / "store"), remote)
    assert answers[0] == answers[1]
    words = answers[0]["failed"]
    assert words.startswith("saving the checkpoint of step 2 failed on rank 1: StoreFull: No space left to write ")
    assert words.endswith("free some space, then continue the run.") and "\n" not in words
    assert list(second.glob("*")) == []
    assert committed(store) == [CheckpointName(1, 1)]
    verify(store, 1, 1)


@pytest.mark.parametrize("reader", [1, 2])
@pytest.mark.parametrize("writer", [1, 2])
def test_resume_has_the_same_tensors_and_the_random_states_of_the_rule(
    policy: Path, tmp_path: Path, writer: int, reader: int
) -> None:
    root = str(Run.start(tmp_path / "store").store.local_path(""))
    drawn = ranks.run(writer, saves.save_for_a_resume, policy, root, tmp_path)
    answers = ranks.run(reader, saves.resume, policy, root, tmp_path)
    assert [answer["different"] for answer in answers] == [[]] * reader
    if writer != reader:
        seeds = [derived_seed(5, 2, rank, reader) for rank in range(reader)]
        drawn = [torch.rand(3, generator=torch.Generator().manual_seed(seed)).tolist() for seed in seeds]
    assert [answer["drawn"] for answer in answers] == drawn


def test_large_checkpoints_are_cut_into_files_that_load_again(policy: Path, tmp_path: Path) -> None:
    store = Run.start(tmp_path / "store").store
    answers = ranks.run(2, saves.save_in_small_files, policy, str(tmp_path / "store"), tmp_path)
    assert answers == [[], []]
    files = verify(store, 1, 2).files
    assert len(files) > 4
    for name in files:
        tensors = load_file(str(store.local_path(layout.checkpoint(1, 2) + name)))
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 4096


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.start(tmp_path / "store")


@pytest.fixture
def learner(policy: Path, tmp_path: Path) -> Iterator[Learner]:
    """A policy and its optimizer in a group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield ranks.policy_of(policy)
    dist.destroy_process_group()


def follower(run: Run, learner: Learner, **settings: Any) -> Rank:
    config = parse({"checkpointing": settings}, where="test")
    cache = PartCache(TrajectoryStore(run.store, 1))
    return Rank(config, run.store, 1, *learner, cache, (), ranks.CPU, None)


def test_only_one_save_is_in_flight(run: Run, learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    told, order = threading.Event(), []
    write, fill, wait = saves.hold_writes(told), checkpoint.HostCopy.fill, saving.Saving.wait

    def noted_write(directory: Path, tensors: Any, **options: Any) -> None:
        write(directory, tensors, **options)
        order.append("written")

    def noted_fill(self: checkpoint.HostCopy, tensors: Any) -> None:
        order.append("copied")
        fill(self, tensors)

    def telling_wait(self: saving.Saving, *limit: float) -> None:
        if order:
            told.set()
        wait(self, *limit)

    monkeypatch.setattr(checkpoint, "write", noted_write)
    monkeypatch.setattr(checkpoint.HostCopy, "fill", noted_fill)
    monkeypatch.setattr(saving.Saving, "wait", telling_wait)
    with saving_of(run.store, learner) as saver:
        saver.start(save_of(1))
        saver.start(save_of(2))
    assert order == ["copied", "written", "copied", "written"]
    assert committed(run.store) == [CheckpointName(1, 1), CheckpointName(1, 2)]


@pytest.mark.parametrize(("asynchronous", "first"), [(True, set()), (False, {"checkpoint_seconds"})])
def test_a_save_says_how_long_it_kept_the_loop_and_how_long_the_last_one_took(
    run: Run, learner: Learner, asynchronous: bool, first: set[str]
) -> None:
    with saving_of(run.store, learner, async_save=asynchronous) as saver:
        assert saver.start(save_of(1)).keys() == first | {"checkpoint_blocked_seconds"}
        assert bool(committed(run.store)) or asynchronous
        assert saver.start(save_of(2)).keys() == {"checkpoint_seconds", "checkpoint_blocked_seconds"}


def test_failed_save_ends_the_loop_at_its_next_command(
    run: Run, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()
    discard = saving.Saving._discard

    def unavailable(*arguments: Any, **options: Any) -> None:
        raise StoreUnavailable("The store failed at MANIFEST: TimeoutError.")

    def noted_discard(self: saving.Saving, step: int) -> None:
        discard(self, step)
        failed.set()

    monkeypatch.setattr(saving, "commit_manifest", unavailable)
    monkeypatch.setattr(saving.Saving, "_discard", noted_discard)

    def commands() -> Commands:
        yield save_of(3)
        assert failed.wait(60)
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join(60)
        yield Idle()
        raise AssertionError("another command was drawn")

    with pytest.raises(SaveFailed, match=r"step 3 failed on rank 0: StoreUnavailable: The store failed at MANIFEST"):
        follow(follower(run, learner), commands())
    assert run.store.list(layout.checkpoint(1, 3), recursive=True) == []


def test_loop_that_fails_still_finishes_the_save_in_flight(
    run: Run, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Event()
    monkeypatch.setattr(checkpoint, "write", saves.hold_writes(told))

    def commands() -> Commands:
        yield save_of(3)
        told.set()
        raise ValueError("the step after it failed")

    with pytest.raises(ValueError, match="the step after it failed"):
        follow(follower(run, learner), commands())
    verify(run.store, 1, 3)


def test_save_that_takes_too_long_is_named(run: Run, learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    monkeypatch.setattr(checkpoint, "write", saves.hold_writes(told))
    saver = saving_of(run.store, learner)
    saver.start(save_of(3))
    with pytest.raises(SaveFailed, match=r"step 3 kept the trainer waiting for 0\.01 s"):
        saver.wait(0.01)
    told.set()
    saver.wait()


def test_trainer_fenced_while_it_saves_commits_nothing(
    run: Run, learner: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Event()
    monkeypatch.setattr(checkpoint, "write", saves.hold_writes(told))
    saver = saving_of(run.store, learner)
    saver.start(save_of(3))
    Run.start(tmp_path / "store")
    told.set()
    with pytest.raises(SaveFailed, match="Fenced: Attempt 1"):
        saver.wait()
    assert run.store.list(layout.checkpoint(1, 3), recursive=True) == []


def test_unknown_metric_of_retention_is_said(run: Run, learner: Learner, capsys: pytest.CaptureFixture[str]) -> None:
    with saving_of(run.store, learner, metric_name="kl_reference") as saver:
        saver.start(save_of(3))
    assert "has no metric 'kl_reference'" in capsys.readouterr().err


def checkpoint_of(store: ObjectStore, attempt: int, step: int, **metrics: float) -> None:
    commit_manifest(store, Manifest(attempt, step, step, {}, {}, 0.0, metrics=metrics))


ONE = RunConfig(checkpointing=CheckpointingConfig(keep_last=1, keep_top_k=0))


def test_retention_keeps_parents_and_steps_over_what_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Run.start(tmp_path).store
    for step in (1, 2, 3):
        checkpoint_of(store, 1, step)
    Run.start(tmp_path, parent=(1, 2))
    for step in (4, 5):
        checkpoint_of(store, 2, step)
    store.put(layout.manifest(1, 1), b"{}")
    retain(store, 2, ONE)
    assert committed(store) == [CheckpointName(1, 1), CheckpointName(1, 2), CheckpointName(2, 5)]
    assert "checkpoint 1.1 is left where it is" in capsys.readouterr().err


@pytest.mark.parametrize(("higher", "best"), [(True, 2), (False, 1)])
def test_retention_keeps_the_best_in_the_direction_asked_for(tmp_path: Path, higher: bool, best: int) -> None:
    store = Run.start(tmp_path).store
    for step, loss in ((1, 0.1), (2, 0.9), (3, 0.5), (4, 0.4)):
        checkpoint_of(store, 1, step, loss=loss)
    kept = CheckpointingConfig(keep_last=1, keep_top_k=1, metric_name="loss", higher_is_better=higher)
    retain(store, 1, RunConfig(checkpointing=kept))
    assert committed(store) == [CheckpointName(1, best), CheckpointName(1, 4)]


def test_retention_keeps_the_best_by_its_evaluation(tmp_path: Path) -> None:
    store = Run.start(tmp_path).store
    for step in range(1, 7):
        checkpoint_of(store, 1, step, loss=1.0)
    # The newest evaluation at or before the step is what a checkpoint is ranked by; equal ones by their age.
    for version, reward in ((0, 0.9), (1, 0.2), (3, 0.7), (5, 0.5)):
        row = {"version": version, "dataset_index": 0, "mode": "sampled", "reward": reward, "prompt": "[]",
               "completion": "", "tokens": 1, "finish_reason": "stop"}  # fmt: skip
        data = schema.encode(schema.table([row], schema.EVALUATION), schema.EVALUATION, {})
        store.put_if_absent(layout.evaluation(1, version), data)
    kept = CheckpointingConfig(keep_last=1, keep_top_k=1, metric_name="evaluation/sampled")
    retain(store, 1, RunConfig(checkpointing=kept))
    assert committed(store) == [CheckpointName(1, 4), CheckpointName(1, 6)]


def test_a_fenced_trainer_deletes_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Run.start(tmp_path).store
    for step in (1, 2, 3, 4):
        checkpoint_of(store, 1, step)
    delete = saving.delete

    def delete_and_be_fenced(*arguments: Any) -> None:
        delete(*arguments)
        Run.start(tmp_path)

    monkeypatch.setattr(saving, "delete", delete_and_be_fenced)
    with pytest.raises(Fenced):
        retain(store, 1, ONE)
    assert committed(store) == [CheckpointName(1, step) for step in (2, 3, 4)]
    with pytest.raises(Fenced):
        retain(store, 1, ONE)
    assert read_manifest(store, 1, 2).step == 2
