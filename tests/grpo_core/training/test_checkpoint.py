"""What one number of ranks saved, another reads back bit by bit, and none of it is a pickle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from grpo_core.training import checkpoint
from tests.grpo_core import tiny
from tests.grpo_core.training import ranks


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("policy") / "tiny", tie_word_embeddings=True)


@dataclass(frozen=True)
class Saved:
    """A checkpoint, and the loss and gradient norm of the step that the process which wrote it took next."""

    path: Path
    next: list[float]


@pytest.fixture(scope="module")
def saved(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Saved]:
    made = {}
    for world in (1, 2):
        path = tmp_path_factory.mktemp("saved") / f"by-{world}"
        (path / "tensors").mkdir(parents=True)
        answers = ranks.run(world, ranks.save_after_steps, policy, path)
        made[world] = Saved(path, answers[0]["next"])
    return made


@pytest.fixture(scope="module")
def loaded(policy: Path, saved: dict[int, Saved]) -> dict[int, list[dict[str, Any]]]:
    paths = [each.path for each in saved.values()]
    return {world: ranks.run(world, ranks.load_and_compare, policy, paths) for world in (1, 2)}


@pytest.mark.parametrize("reader", [1, 2])
@pytest.mark.parametrize("writer", [1, 2])
def test_another_number_of_ranks_reads_the_same_bits(
    loaded: dict[int, list[dict[str, Any]]], writer: int, reader: int
) -> None:
    for answer in loaded[reader]:
        assert answer[f"by-{writer}"]["different"] == []


@pytest.mark.parametrize("reader", [1, 2])
@pytest.mark.parametrize("writer", [1, 2])
def test_the_next_step_is_that_of_the_uninterrupted_run(
    saved: dict[int, Saved], loaded: dict[int, list[dict[str, Any]]], writer: int, reader: int
) -> None:
    found = loaded[reader][0][f"by-{writer}"]["next"]
    assert found == (saved[writer].next if writer == reader else pytest.approx(saved[writer].next, rel=1e-6))


@pytest.mark.parametrize("world", [1, 2])
def test_no_file_is_a_pickle(saved: dict[int, Saved], world: int) -> None:
    files = [path for path in (saved[world].path / "tensors").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".safetensors", ".json"}
    names = set()
    for path in files:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as tensors:
                names |= set(tensors.keys())
    assert any(name.startswith("model.") for name in names)
    assert {name.rsplit(".", 1)[1] for name in names if name.startswith("optimizer.")} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }


def test_a_policy_that_no_step_has_touched_can_be_saved_and_loaded(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "tensors").mkdir()
    ranks.run(1, ranks.save_untouched, policy, tmp_path)
    assert list((tmp_path / "tensors").glob("*.safetensors"))


def test_random_states_come_back_as_they_were() -> None:
    torch.manual_seed(7)
    torch.rand(3)
    states = checkpoint.random_states()
    expected = torch.rand(4)
    torch.manual_seed(0)
    checkpoint.restore_random_states(states)
    assert torch.equal(torch.rand(4), expected)


def test_a_copy_does_not_follow_its_tensors_and_is_filled_again_in_place() -> None:
    tensors = {
        "matrix": torch.randn(3, 5),
        "half": torch.randn(7).bfloat16(),
        "nothing": torch.zeros(0, 4),
        "step": torch.ones(1),
    }
    copy = checkpoint.HostCopy(tensors, mesh=None)  # type: ignore[arg-type]
    copy.fill(tensors)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    places = {name: tensor.data_ptr() for name, tensor in copy.tensors.items()}
    for tensor in tensors.values():
        tensor.add_(1)
    for name, tensor in copy.tensors.items():
        assert torch.equal(tensor, before[name]) and tensor.dtype == before[name].dtype
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    copy.fill(tensors)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in copy.tensors.items())
    assert places == {name: tensor.data_ptr() for name, tensor in copy.tensors.items()}
