"""Adapters begin as nothing, are the same on every rank, and leave as weights or as PEFT's own files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo_core.config import LoRAConfig
from grpo_core.refit.adapters import Adapter, write_adapter
from grpo_core.refit.digest import checkpoint_shapes
from grpo_core.training.lora import (
    AdapterError,
    adapter_weights,
    add_adapters,
    gather_adapters,
    gather_base,
    gather_merged,
    is_adapter,
    merge_adapters,
    without_adapters,
)
from tests.grpo_core import experts, tiny
from tests.grpo_core.training import ranks


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("policy") / "tiny")


@pytest.fixture(scope="module")
def outcomes(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[list[dict], Path]]:
    made = {}
    for world in (1, 2):
        directory = tmp_path_factory.mktemp(f"world-{world}")
        made[world] = ranks.run(world, ranks.adapted, policy, directory), directory
    return made


def load(path: Path) -> dict[str, torch.Tensor]:
    with np.load(path) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def logprobs(model: torch.nn.Module) -> list[float]:
    ids = torch.from_numpy(ranks.make_rows(1, seed=7)[0].ids).long()
    generated = ranks.make_rows(1, seed=7)[0].generated[1:]
    with torch.no_grad():
        values = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1] / 0.9, -1).gather(1, ids[1:, None])[:, 0]
    return values[torch.from_numpy(generated)].tolist()


@pytest.mark.parametrize("world", [1, 2])
def test_merged_weights_are_those_of_a_plain_model(policy: Path, outcomes: dict, world: int) -> None:
    answers, directory = outcomes[world]
    merged = load(directory / "merged.npz")
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(merged)
    assert logprobs(model) == pytest.approx(answers[0]["logprobs"], abs=1e-5)
    changed = {name for name, value in merged.items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if "q_proj" in name or "down_proj" in name}
    assert answers[-1]["kept"] == ([len(merged), 4, len(merged)] if world == 1 else [0, 0, 0])


@pytest.mark.parametrize("world", [1, 2])
def test_the_base_stays_that_of_the_plain_model(policy: Path, outcomes: dict, world: int) -> None:
    base = load(outcomes[world][1] / "base.npz")
    plain = dict(AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).named_parameters())
    assert base.keys() >= plain.keys()
    assert all(torch.equal(base[name], weight) for name, weight in plain.items())


@pytest.mark.parametrize("world", [1, 2])
def test_adapters_leave_as_a_file_that_peft_reads(policy: Path, outcomes: dict, world: int, tmp_path: Path) -> None:
    answers, directory = outcomes[world]
    factors = load(directory / "adapters.npz")
    layers = {name[:-2]: (factor, factors[f"{name[:-2]}.B"]) for name, factor in factors.items() if name.endswith(".A")}
    path = write_adapter(Adapter(layers, 4, 16.0, str(policy)), tmp_path / "1.2")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32), path)
    assert logprobs(model) == pytest.approx(answers[0]["logprobs"], abs=1e-5)


@pytest.mark.parametrize("world", [1, 2])
def test_sharded_experts_leave_as_files_that_transformers_reads(tmp_path: Path, world: int) -> None:
    directory, output = experts.make(tmp_path / "experts"), tmp_path / "output"
    output.mkdir()
    (answer, *_) = ranks.run(world, ranks.adapted, directory, output, {"rank": 4})
    merged = load(output / "merged.npz")
    assert {name: tuple(weight.shape) for name, weight in merged.items()} == checkpoint_shapes(directory)
    save_file(merged, directory / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert logprobs(model) == pytest.approx(answer["logprobs"], abs=1e-5)


def test_ranks_draw_the_same_adapters(outcomes: dict) -> None:
    one, two = (load(outcomes[world][1] / "adapters.npz") for world in (1, 2))
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], atol=5e-6, rtol=0)


def test_adapters_begin_as_nothing_and_depend_on_the_seed_alone(policy: Path) -> None:
    made = []
    for seed, drawn_before in ((1, 0), (1, 5), (2, 0)):
        torch.manual_seed(drawn_before)
        model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
        plain = logprobs(model)
        add_adapters(model, LoRAConfig(), seed=seed)
        assert logprobs(model) == plain
        state = torch.get_rng_state()
        torch.manual_seed(drawn_before)
        assert torch.equal(state, torch.get_rng_state())
        made.append({name: value for name, value in model.named_parameters() if is_adapter(name)})
    assert all(torch.equal(value, made[1][name]) for name, value in made[0].items())
    assert any(not torch.equal(value, made[2][name]) for name, value in made[0].items())
    assert len(made[0]) == 2 * 2 * 7  # layers, factors, linear layers but the head


def test_without_adapters_the_model_is_what_it_was(policy: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    plain = logprobs(model)
    add_adapters(model, LoRAConfig(), seed=0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if is_adapter(name):
                value.fill_(0.1)
    adapted = logprobs(model)
    with without_adapters(model):
        assert logprobs(model) == plain
    assert logprobs(model) == adapted != plain
    assert all(value.requires_grad == is_adapter(name) for name, value in model.named_parameters())


def test_a_model_without_adapters_leaves_as_it_is(policy: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    merged = dict(gather_merged(model, dtype=torch.float32, device="cpu", keep=True))
    assert merged.keys() == dict(model.named_parameters(remove_duplicate=False)).keys()
    assert gather_adapters(model, dtype=torch.float32, device="cpu", keep=True) == {}


WIRE: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "keep": True}


def adapted_mixture(directory: Path) -> PreTrainedModel:
    """A model with adapters that say something."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    add_adapters(model, LoRAConfig(rank=2), seed=0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if is_adapter(name):
                value.fill_(0.1)
    return model


@pytest.mark.parametrize("family", experts.CONFIGS)
def test_experts_stay_as_they_are_and_leave_as_in_the_checkpoint(tmp_path: Path, family: str) -> None:
    directory = experts.make(tmp_path / family, family)
    disk, model = checkpoint_shapes(directory), adapted_mixture(directory)
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    base, merged = dict(gather_base(model, **WIRE)), dict(gather_merged(model, **WIRE))
    for weights in (base, merged):
        assert {name: tuple(weight.shape) for name, weight in weights.items()} == disk
    assert all(torch.equal(base[name], weight) for name, weight in gather_merged(plain, **WIRE))
    adapted = {f"{name}.weight" for name in gather_adapters(model, **WIRE)}
    assert {name for name in merged if not torch.equal(merged[name], base[name])} == adapted
    assert {name.split(".")[-2] for name in adapted} >= {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert not [name for name in adapted if ".experts." in name]


def test_merged_adapters_are_in_the_weights_of_a_plain_model(tmp_path: Path) -> None:
    directory = experts.make(tmp_path / "glm4_moe", "glm4_moe")
    model = adapted_mixture(directory)
    expected = logprobs(model)
    merge_adapters(model)
    model.save_pretrained(tmp_path / "merged")
    assert checkpoint_shapes(tmp_path / "merged") == checkpoint_shapes(directory)
    assert logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("embed_tokens", "model.embed_tokens is no linear layer (Embedding)"),
        ("experts", "model.layers.0.mlp.experts is no linear layer (Qwen3MoeExperts)"),
        ("proj", "the qwen3_moe model has no layer of that name"),
        ("down_proj", "the qwen3_moe model has no layer of that name"),
    ],
)
def test_what_is_no_linear_layer_gets_no_adapter(tmp_path: Path, target: str, message: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(experts.make(tmp_path / "experts"))
    with pytest.raises(AdapterError, match=re.escape(f"names {target}, but {message}; name some of k_proj, o_proj,")):
        add_adapters(model, LoRAConfig(target_modules=("q_proj", target)), seed=0)


def test_a_head_of_another_name_gets_no_adapter(policy: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(policy)
    model.other_head = model.lm_head
    model.set_output_embeddings(model.other_head)
    with pytest.raises(AdapterError, match="lm_head is the output head; name some of"):
        add_adapters(model, LoRAConfig.model_construct(target_modules=("lm_head",)), seed=0)


def test_layers_may_be_meant_by_their_full_names(policy: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(policy)
    add_adapters(model, LoRAConfig(rank=2, target_modules=("layers.1.self_attn.q_proj", "v_proj")), seed=0)
    wanted = {"model.layers.1.self_attn.q_proj", *(f"model.layers.{layer}.self_attn.v_proj" for layer in (0, 1))}
    assert gather_adapters(model, **WIRE).keys() == wanted
    assert adapter_weights(model) == 2 * (64 + 128) + 2 * 2 * (64 + 64)
