"""A policy loads, recomputes, compiles and offloads as asked, and what it cannot do it refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    NemotronConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
)

from grpo_core.config import RunConfig
from grpo_core.training import model
from grpo_core.training.model import PolicyError, check_scores, load_language_model
from tests.grpo_core import experts, tiny
from tests.grpo_core.training import ranks

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "max_position_embeddings": 128,
}
FAMILIES = {"qwen2": Qwen2Config(**SIZES), "llama": LlamaConfig(**SIZES, tie_word_embeddings=True)}


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("policies")
    for name, config in FAMILIES.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
    return {"qwen3": tiny.make(root / "qwen3"), **{name: root / name for name in FAMILIES}}


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"training": {"activation_checkpointing": True}},
    "compiled": {"training": {"torch_compile": True}},
    "offloaded": {"training": {"cpu_offload": True, "device": "cuda"}},
    "both": {"training": {"torch_compile": True, "activation_checkpointing": True}},
    "half": {"model": {"dtype": "bfloat16"}},
}


def observe(directory: str, ways: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One step each way: its figures, and how often a layer's MLP ran forward."""
    # The compiler is torch's own affair; what is traced here is run as it is.
    compile_module = torch.nn.Module.compile
    torch.nn.Module.compile = lambda self: compile_module(self, backend="eager")  # type: ignore[assignment]
    found = {}
    for name, changes in ways.items():
        torch._dynamo.reset()
        learner = ranks.Learner(Path(directory), changes)
        layer = learner.policy.language_model.base_model.layers[0]
        runs: list[int] = []
        if "torch_compile" not in changes.get("training", {}):
            layer.mlp.register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
        result = learner.step(1)
        parameters = dict(learner.policy.named_parameters())
        found[name] = {
            "loss": result.loss,
            "norm": result.grad_norm,
            "runs": len(runs),
            "micro_batches": len(learner.plan(1, ranks.make_groups(1)).micro_batches),
            "compiled": layer._compiled_call_impl is not None,
            "dtypes": sorted({str(parameter.dtype) for parameter in parameters.values()}),
            "names": sorted(parameters),
        }
    return found


@pytest.fixture(scope="module")
def observed(policies: dict[str, Path]) -> dict[str, Any]:
    (answer,) = ranks.run(1, observe, str(policies["qwen3"]), WAYS)
    return answer


@pytest.mark.parametrize("way", ["recomputed", "compiled", "offloaded", "both"])
def test_saving_memory_or_time_changes_no_figure(observed: dict[str, Any], way: str) -> None:
    assert observed[way]["loss"] == pytest.approx(observed["plain"]["loss"], abs=1e-6)
    assert observed[way]["norm"] == pytest.approx(observed["plain"]["norm"], rel=1e-5)
    assert observed[way]["names"] == observed["plain"]["names"]


def test_activations_are_recomputed(observed: dict[str, Any]) -> None:
    plain, recomputed = observed["plain"], observed["recomputed"]
    assert plain["runs"] == plain["micro_batches"]
    assert recomputed["runs"] == 2 * recomputed["micro_batches"]


def test_layers_are_compiled_where_asked(observed: dict[str, Any]) -> None:
    assert [observed[way]["compiled"] for way in ("plain", "compiled", "both")] == [False, True, True]


def test_half_precision_computes_near_it_and_keeps_float32_weights(observed: dict[str, Any]) -> None:
    assert observed["half"]["dtypes"] == ["torch.float32"]
    assert observed["half"]["loss"] != observed["plain"]["loss"]
    assert observed["half"]["loss"] == pytest.approx(observed["plain"]["loss"], abs=0.05)


def shards(directory: str, changes: dict[str, dict[str, Any]]) -> list[str]:
    """How each module of the policy was sharded."""
    said: list[str] = []
    really = model.fully_shard

    def remember(module: Any, *, mesh: Any, mp_policy: MixedPrecisionPolicy, offload_policy: Any) -> None:
        offloads = isinstance(offload_policy, CPUOffloadPolicy)
        said.append(f"{type(module).__name__} {mp_policy.param_dtype} {mp_policy.reduce_dtype} {offloads}")
        really(module, mesh=mesh, mp_policy=mp_policy, offload_policy=offload_policy)

    model.fully_shard = remember  # type: ignore[assignment]
    ranks.Learner(Path(directory), changes)
    return said


def test_layers_come_first_then_the_rest(policies: dict[str, Path]) -> None:
    changes = {"model": {"dtype": "bfloat16"}, "training": {"cpu_offload": True, "device": "cuda"}}
    (said,) = ranks.run(1, shards, str(policies["qwen3"]), changes)
    how = "torch.bfloat16 torch.float32 True"
    assert said == [f"Qwen3DecoderLayer {how}"] * 2 + [f"Policy {how}"]


@pytest.mark.parametrize("offload", [False, True])
def test_no_device_ever_holds_the_whole_policy(monkeypatch: pytest.MonkeyPatch, offload: bool) -> None:
    events: list[tuple[str, int, bool]] = []

    def recorded(module: torch.nn.Module, *, mesh: Any, mp_policy: MixedPrecisionPolicy, offload_policy: Any) -> None:
        """Take what no inner call has taken, as the real one does."""
        fresh = [parameter for parameter in module.parameters() if not hasattr(parameter, "taken")]
        for parameter in fresh:
            parameter.taken = True  # type: ignore[attr-defined]
        events.append((type(module).__name__, len(fresh), isinstance(offload_policy, CPUOffloadPolicy)))
        module.__class__ = type("Sharded", (FSDPModule, type(module)), {})

    def moved(module: torch.nn.Module, *_: Any, **__: Any) -> torch.nn.Module:
        events.append((f"{type(module).__name__} moved", 0, False))
        return module

    monkeypatch.setattr(model, "fully_shard", recorded)
    for name in ("to", "cuda", "_apply"):
        monkeypatch.setattr(torch.nn.Module, name, moved)
    policy = model.Policy(AutoModelForCausalLM.from_config(FAMILIES["llama"]), 1.0)
    events.clear()
    run = RunConfig.model_validate({"training": {"cpu_offload": offload, "device": "cuda"}})
    model.shard(policy, run, mesh=SimpleNamespace(device_type="cuda"))  # type: ignore[arg-type]
    # Each layer has nine parameters of its own; the embedding, which is also the head, and the last norm are left.
    assert events == [("LlamaDecoderLayer", 9, offload)] * 2 + [("Policy", 2, offload)]


def families(directories: dict[str, str]) -> dict[str, list[float]]:
    return {name: [ranks.Learner(Path(path), {}).step(1).loss] for name, path in directories.items()}


def test_every_family_takes_the_same_step_on_two_ranks(policies: dict[str, Path]) -> None:
    paths = {name: str(path) for name, path in policies.items()}
    (alone,), (first, second) = (ranks.run(world, families, paths) for world in (1, 2))
    assert first == second
    for name, losses in alone.items():
        assert losses == pytest.approx(first[name], abs=1e-6), name


def refused(directory: str, changes: dict[str, dict[str, Any]]) -> str:
    try:
        ranks.Learner(Path(directory), changes)
    except PolicyError as error:
        return str(error)
    return ""


def test_a_router_term_needs_experts(policies: dict[str, Path]) -> None:
    changes = {"model": {"router_aux_loss_coefficient": 0.01}}
    (message,) = ranks.run(1, refused, str(policies["qwen3"]), changes)
    assert message.startswith("model.router_aux_loss_coefficient=0.01 balances experts, but the qwen3 model in")


def test_layers_that_carry_a_state_along_the_row_are_refused(tmp_path: Path) -> None:
    config = Qwen3NextConfig(
        **SIZES,
        head_dim=16,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(PolicyError, match="layers of the kind linear_attention, which would leak"):
        load_language_model(tmp_path, torch.float32)


def saved(config: PreTrainedConfig, directory: Path) -> Path:
    """A model with weights that tell its tokens apart."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return directory


HEADS: dict[str, PreTrainedConfig] = {
    "granite": GraniteConfig(**SIZES, logits_scaling=8.0),
    "cohere2": Cohere2Config(**SIZES, logit_scale=0.25),
    "gemma2": Gemma2Config(**SIZES, head_dim=16, attn_logit_softcapping=None, final_logit_softcapping=2.0),
    **experts.CONFIGS,
}


@pytest.mark.parametrize("family", HEADS)
def test_what_a_family_does_with_its_logits_is_done_here(tmp_path: Path, family: str) -> None:
    language_model = load_language_model(saved(HEADS[family], tmp_path), torch.float32)
    implementation = language_model.config._attn_implementation
    check_scores(language_model)
    assert language_model.config._attn_implementation == implementation


REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "bias": (PhiConfig(**SIZES), "has a linear layer with a bias as its output head"),
    "state": (
        RecurrentGemmaConfig(**SIZES, lru_width=32, attention_window_size=32),
        "the trainer would compute other log-probs than the recurrent_gemma model",
    ),
    "layers": (GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=300), "has no list of decoder layers"),
    "arguments": (NemotronConfig(**SIZES), "does not take packed sequences"),
    "attention": (FalconConfig(**SIZES), "has attention of its own kind"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_the_trainer_does_not_know_is_refused(tmp_path: Path, kind: str) -> None:
    config, message = REFUSED[kind]
    directory = saved(config, tmp_path)
    with pytest.raises(PolicyError, match=message):
        check_scores(load_language_model(directory, torch.float32))


def test_a_head_that_does_more_is_refused_at_load(policies: dict[str, Path]) -> None:
    language_model = load_language_model(policies["llama"], torch.float32)
    check_scores(language_model)
    head = language_model.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, logits: 1.5 * logits)
    with pytest.raises(PolicyError, match=r"other log-probs than the llama model in .*llama itself, by"):
        check_scores(language_model)


def test_every_policy_is_checked(tmp_path: Path) -> None:
    directory = saved(PhiConfig(**SIZES), tmp_path)
    (message,) = ranks.run(1, refused, str(directory), {})
    assert message == (
        f"the phi model in {directory} has a linear layer with a bias as its output head; "
        "choose a model whose head is one matrix"
    )
