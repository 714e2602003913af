"""The config is valid as it comes, and refuses what cannot work in a sentence that names key and value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from grpo_core.config import ExternalPool, LocalPool, RunConfig
from grpo_core.recipe import ConfigError, load, parse


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(values, where="recipe.yaml")
    return str(caught.value)


def test_defaults_are_a_valid_run() -> None:
    config = RunConfig()
    assert parse({}, where="nothing") == config
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


def test_values_cannot_be_changed_after_validation() -> None:
    with pytest.raises(Exception, match="frozen"):
        RunConfig().grpo.num_prompts_per_step = 3  # type: ignore[misc]


RULES: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"grpo": {"async_grpo": {"max_trajectory_age_steps": 3}}, "objective": {"importance_correction": "none"}},
        ["grpo.async_grpo.max_trajectory_age_steps=3", "objective.importance_correction", "acknowledge_no_correction=true"],
    ),
    (
        {"generation": {"max_completion_length": 4096}},
        ["generation.max_completion_length=4096", "model.context_length=4096"],
    ),
    ({"packing": {"token_budget": 100}}, ["packing.token_budget=100", "model.context_length=4096"]),
    (
        {"grpo": {"num_prompts_per_step": 1, "num_generations_per_prompt": 2}, "training": {"ranks": 3}},
        ["2 rollouts", "3 trainer ranks", "grpo.num_prompts_per_step"],
    ),
    ({"refit": {"backend": "nccl"}}, ["refit.backend=nccl", "training.device is cpu"]),
    (
        {
            "refit": {"backend": "ipc"},
            "training": {"device": "cuda", "nodes": 2, "rendezvous": "first:29500"},
            "pool": {"kind": "local", "device": "cuda"},
        },
        ["refit.backend=ipc", "training.nodes"],
    ),
    (
        {"refit": {"backend": "ipc"}, "training": {"device": "cuda", "ranks": 2}, "pool": {"kind": "local", "device": "cuda"}},
        ["refit.backend=ipc", "training.ranks is 2"],
    ),
    (
        {"refit": {"backend": "ipc"}, "training": {"device": "cuda"}, "pool": {"kind": "external", "urls": ["http://a:1"]}},
        ["refit.backend=ipc", "pool.kind is external"],
    ),
    (
        {"refit": {"backend": "ipc"}, "training": {"device": "cuda"}, "pool": {"kind": "local", "device": "cuda", "host": "10.0.0.1"}},
        ["refit.backend=ipc", "pool.host is 10.0.0.1", "127.0.0.1"],
    ),
    (
        {"refit": {"backend": "nccl"}, "training": {"device": "cuda"}, "pool": {"kind": "local", "device": "cpu"}},
        ["refit.backend=nccl", "pool.device is cpu"],
    ),
    ({"pool": {"kind": "local", "device": "cuda"}}, ["refit.backend=gloo", "pool.device is cuda"]),
    ({"pool": {"kind": "local", "device": "cuda", "engines": 2}}, ["pool.engines=2", "pool.gpus"]),
    ({"model": {"source": {"kind": "tiny", "heads": 4, "kv_heads": 3}}}, ["kv_heads=3", "heads=4"]),
    (
        {"objective": {"importance_floor": 3.0, "importance_cap": 2.0}},
        ["objective.importance_floor=3", "objective.importance_cap=2"],
    ),
    ({"rewards": {"functions": [{"function": "m:f"}, {"function": "m:f"}]}}, ["rewards.functions", "m:f more than once"]),
    (
        {"training": {"step_timeout_seconds": 900}},
        ["training.step_timeout_seconds=900", "generation.lease_timeout_seconds=900"],
    ),
    ({"training": {"nodes": 2}}, ["training.nodes=2", "training.rendezvous"]),
    (
        {"evaluation": {"every_steps": 5}, "refit": {"every_steps": 2}},
        ["evaluation.every_steps=5", "refit.every_steps=2"],
    ),
    (
        {"evaluation": {"samples": 4, "samples_per_prompt": 8}},
        ["evaluation.samples_per_prompt=8", "evaluation.samples=4"],
    ),
    (
        {"evaluation": {"every_steps": 5, "stop_metric": "greedy"}},
        ["evaluation.stop_metric=greedy", "evaluation.stop_threshold"],
    ),
    (
        {"evaluation": {"every_steps": 5, "stop_threshold": 0.5}},
        ["evaluation.stop_threshold=0.5", "evaluation.stop_metric"],
    ),
    (
        {"evaluation": {"stop_metric": "sampled", "stop_threshold": 0.5}},
        ["evaluation.stop_metric=sampled", "evaluation.every_steps"],
    ),
    (
        {"evaluation": {"every_steps": 5, "greedy": False, "stop_metric": "greedy", "stop_threshold": 0.5}},
        ["evaluation.stop_metric=greedy", "evaluation.greedy"],
    ),
    (
        {"evaluation": {"every_steps": 5, "samples_per_prompt": 4, "stop_metric": "pass@8", "stop_threshold": 0.5}},
        ["evaluation.stop_metric=pass@8", "evaluation.samples_per_prompt=4"],
    ),
    (
        {"evaluation": {"every_steps": 5, "samples_per_prompt": 4, "stop_metric": "pass@3", "stop_threshold": 0.5}},
        ["evaluation.stop_metric=pass@3", "1, 2, 4"],
    ),
    ({"evaluation": {"stop_metric": "reward"}}, ["evaluation.stop_metric", "reward"]),
    (
        {"evaluation": {"every_steps": 5}, "data": {"source": {"kind": "files", "path": "a.jsonl"}}},
        ["evaluation.every_steps=5", "data.source.held_out_path"],
    ),
    ({"checkpointing": {"metric_name": "evaluation/pass@2"}}, ["evaluation/pass@2", "evaluation.samples_per_prompt"]),
    ({"checkpointing": {"metric_name": "evaluation/reward"}}, ["evaluation/reward", "sampled, greedy and pass@k"]),
    ({"training": {"cpu_offload": True}}, ["training.cpu_offload=true", "training.device is cpu"]),
    ({"grpo": {"minibatches": 33}}, ["grpo.minibatches=33", "grpo.num_prompts_per_step=32"]),
    ({"model": {"lora": {"target_modules": ["lm_head"]}}}, ["model.lora.target_modules", "lm_head"]),
    ({"refit": {"adapter_only": True}}, ["refit.adapter_only=true", "model.lora"]),
    (
        {"refit": {"adapter_only": True}, "model": {"lora": {"rank": 513}}},
        ["model.lora.rank=513", "512", "refit.adapter_only"],
    ),
    (
        {
            "refit": {"adapter_only": True},
            "model": {"lora": {}},
            "pool": {"kind": "external", "urls": ["http://a:1"]},
        },
        ["refit.adapter_only=true", "refit.adapter_directory", "pool.kind is external"],
    ),
    ({"model": {"router_aux_loss_coefficient": 1.5}}, ["model.router_aux_loss_coefficient", "1.5"]),
    ({"sampling": {"top_p": 0.9}}, ["sampling.top_p=0.9", "1.0"]),
    ({"sampling": {"top_k": 5}}, ["sampling.top_k=5"]),
    ({"sampling": {"min_p": 0.1}}, ["sampling.min_p=0.1"]),
    ({"sampling": {"repetition_penalty": 1.1}}, ["sampling.repetition_penalty=1.1"]),
    ({"data": {"source": {"kind": "reasoning_gym", "seed": 7, "held_out_seed": 7}}}, ["data.source.held_out_seed", "7"]),
    ({"pool": {"kind": "local", "engines": 2, "gpus": [[0]]}}, ["pool.gpus", "pool.engines=2"]),
    ({"pool": {"kind": "local", "engines": 2, "gpus": [[0], [0]]}}, ["pool.gpus", "GPU 0 more than once"]),
    ({"pool": {"kind": "local", "gpus": [[1, 1]], "tensor_parallel_size": 2}}, ["pool.gpus", "GPU 1 more than once"]),
    ({"pool": {"kind": "local", "gpus": [[0, 1]], "tensor_parallel_size": 4}}, ["[0, 1]", "pool.tensor_parallel_size=4"]),
    ({"pool": {"kind": "local", "extra_arguments": ["--host", "0.0.0.0"]}}, ["pool.extra_arguments", "--host"]),
    ({"pool": {"kind": "local", "extra_arguments": ["--logprobs_mode=raw_logprobs"]}}, ["--logprobs_mode=raw_logprobs"]),
    ({"pool": {"kind": "external", "urls": ["http://a:1", "http://b:1", "http://a:1/"]}}, ["pool.urls", "http://a:1"]),
    ({"generation": {"request_timeout_seconds": 5000}}, ["request_timeout_seconds=5000", "lease_timeout_seconds=900"]),
    ({"generation": {"tool_timeout_seconds": 5000}}, ["tool_timeout_seconds=5000", "lease_timeout_seconds=900"]),
    ({"rewards": {"timeout_seconds": 900}}, ["rewards.timeout_seconds=900", "lease_timeout_seconds=900"]),
    (
        {"environment": {"kind": "http", "url": "http://a:1", "timeout_seconds": 5000}},
        ["environment.timeout_seconds=5000", "lease_timeout_seconds=900"],
    ),
    ({"objective": {"beta": -0.1}}, ["objective.beta", "-0.1"]),
    (
        {"objective": {"force_on_policy_ratio": True, "proximal_policy": "log_linear"}},
        ["objective.force_on_policy_ratio=true", "objective.proximal_policy=log_linear"],
    ),
    (
        {"objective": {"proximal_policy": "behaviour", "loss_type": "reinforce"}},
        ["objective.proximal_policy=behaviour", "objective.loss_type=reinforce", "acknowledge_no_correction=true"],
    ),
    (
        {"grpo": {"reward_scaling": {"source_min": 1, "source_max": 1}}},
        ["grpo.reward_scaling.source_min=1", "source_max=1"],
    ),
    (
        {"grpo": {"reward_shaping": {"max_response_length": 100, "overlong_buffer_length": 200}}},
        ["grpo.reward_shaping.overlong_buffer_length=200", "max_response_length=100"],
    ),
    ({"checkpointing": {"metric_name": "reward_maen"}}, ["checkpointing.metric_name=reward_maen", "docs/metrics.md"]),
    ({"checkpointing": {"metric_name": "pool/engines"}}, ["checkpointing.metric_name=pool/engines", "by a step"]),
    ({"checkpointing": {"metric_name": "reward/m:f"}}, ["checkpointing.metric_name=reward/m:f", "reasoning_gym_score"]),
    ({"logging": {"sinks": [{"kind": "statsd"}]}}, ["logging.sinks", "statsd"]),
    ({"optimizer": {"learning_rate": float("inf")}}, ["optimizer.learning_rate", "inf"]),
    ({"rewards": {"functions": [{"function": "m:f", "weight": float("nan")}]}}, ["rewards.functions.0.weight", "nan"]),
    ({"rewards": {"functions": []}}, ["rewards.functions is empty", "environment.kind=none"]),
    ({"generation": {"min_group_members": 9}}, ["generation.min_group_members=9", "grpo.num_generations_per_prompt=8"]),
    ({"generation": {"tools": ["a:f", "b:C.f"]}}, ["generation.tools", "more than one tool called f"]),
    (
        {"generation": {"tools": [{"function": "a:f", "timeout_seconds": 900}]}},
        ["generation.tools a:f.timeout_seconds=900 outlasts a lease"],
    ),
    ({"generation": {"tools": ["calculator"]}}, ["generation.tools.0", "calculator"]),
    (
        {"environment": {"kind": "http", "url": "http://a:1", "instances": 7}},
        ["environment.instances=7", "grpo.num_generations_per_prompt=8"],
    ),
    (
        {"environment": {"kind": "reasoning_gym"}, "data": {"source": {"kind": "files", "path": "x.jsonl"}}},
        ["environment.kind=reasoning_gym", "data.source.kind is files"],
    ),
    ({"environment": {"kind": "http", "url": "ftp://a"}}, ["environment.http.url", "ftp://a"]),
    ({"rewards": {"functions": [{"function": "no colon"}]}}, ["rewards.functions.0.function", "no colon"]),
    ({"pool": {"kind": "external", "urls": ["ftp://x"]}}, ["pool.external.urls.0", "ftp://x"]),
    ({"sampling": {"temperature": 0.005}}, ["sampling.temperature", "0.01", "0.005"]),
    (
        {"objective": {"proximal_policy": "behaviour"}},
        ["objective.importance_correction=token", "objective.proximal_policy=behaviour", "none"],
    ),
    (
        {"objective": {"loss_type": "cispo", "dual_clip": 3.0}},
        ["objective.dual_clip=3.0", "objective.loss_type=cispo"],
    ),
    (
        {"objective": {"loss_type": "reinforce", "epsilon_high": 0.3}},
        ["objective.epsilon_high=0.3", "objective.loss_type=reinforce"],
    ),
    (
        {"objective": {"importance_correction": "none", "acknowledge_no_correction": True, "importance_mode": "band"}},
        ["objective.importance_mode=band", "objective.importance_correction=none"],
    ),
    (
        {"objective": {"kl_placement": "reward", "kl_importance_weight": True}},
        ["objective.kl_importance_weight=True", "objective.kl_placement=reward"],
    ),
    ({"grpo": {"advantage_scale": "none", "advantage_ddof": 1}}, ["grpo.advantage_ddof=1", "grpo.advantage_scale=none"]),
    (
        {"grpo": {"advantage_baseline": "none", "use_dynamic_sampling": True}},
        ["grpo.use_dynamic_sampling=true", "grpo.advantage_baseline=none"],
    ),
    (
        {"grpo": {"reward_scaling": {"target_min": 1.0, "target_max": 1.0}}},
        ["grpo.reward_scaling.target_min=1", "target_max"],
    ),
    (
        {"grpo": {"reward_shaping": {"max_response_length": 500, "overlong_buffer_length": 0}}},
        ["grpo.reward_shaping", "truncated_coefficient=1"],
    ),
    (
        {"grpo": {"reward_shaping": {"max_response_length": 513}}},
        ["grpo.reward_shaping.max_response_length=513", "512 tokens"],
    ),
    ({"optimizer": {"warmup_steps": 101}}, ["optimizer.warmup_steps=101", "grpo.max_num_steps=100"]),
    ({"optimizer": {"learning_rate": 2.0}}, ["optimizer.learning_rate", "2.0"]),
]  # fmt: skip


@pytest.mark.parametrize(("values", "words"), RULES, ids=lambda value: str(value)[:60])
def test_a_broken_rule_is_one_sentence_with_key_and_value(values: dict[str, Any], words: list[str]) -> None:
    message = refusal(values)
    assert message.startswith("recipe.yaml: ")
    assert "\n" not in message
    for word in words:
        assert word in message


def test_window_without_correction_can_be_acknowledged() -> None:
    objective = {"importance_correction": "none", "acknowledge_no_correction": True}
    assert parse({"objective": objective}, where="x").grpo.async_grpo.max_trajectory_age_steps == 2


@pytest.mark.parametrize(
    ("device", "dtype", "asked", "wire"),
    [
        ("cpu", "bfloat16", None, "float32"),
        ("cpu", "bfloat16", "bfloat16", "bfloat16"),
        ("cuda", "bfloat16", None, "bfloat16"),
        ("cuda", "float32", None, "float32"),
        ("cuda", "bfloat16", "float32", "float32"),
    ],
)
def test_weights_travel_in_what_engines_on_gpus_compute_in(device: str, dtype: str, asked: Any, wire: str) -> None:
    values = {
        "model": {"dtype": dtype},
        "training": {"device": device},
        "pool": {"kind": "local", "device": device},
        "refit": {"backend": "store", "wire_dtype": asked},
    }
    assert parse(values, where="x").wire_dtype == wire


@pytest.mark.parametrize("engines", ["cpu", "cuda"])
@pytest.mark.parametrize("trainer", ["cpu", "cuda"])
def test_the_store_serves_engines_of_every_kind(trainer: str, engines: str) -> None:
    values = {
        "refit": {"backend": "store"},
        "training": {"device": trainer},
        "pool": {"kind": "local", "device": engines},
    }
    assert parse(values, where="x").refit.backend == "store"


@pytest.mark.parametrize("recipe", sorted((Path(__file__).parents[2] / "deployments" / "recipes").glob("*.yaml")))
def test_every_recipe_is_valid(recipe: Path) -> None:
    config = load(recipe)
    assert config.generation.request_timeout_seconds < config.generation.lease_timeout_seconds


def test_unknown_keys_are_named_with_their_section() -> None:
    assert "grpo.num_promts: is not a known key" in refusal({"grpo": {"num_promts": 3}})
    assert "colour: is not a known key" in refusal({"colour": "red"})


def test_several_faults_are_counted() -> None:
    assert "(and 1 more)" in refusal({"grpo": {"num_promts": 3}, "colour": "red"})


HOSTILE = ["", ".", "..", "../up", "a/b", "a\\b", "-rf", "a\n", "a b", "a\0", "é", "a" * 129, "$(id)", "a;b", "%2e%2e"]


@pytest.mark.parametrize("run_id", HOSTILE)
def test_a_run_id_that_could_leave_its_directory_is_refused(run_id: str) -> None:
    assert "run_id" in refusal({"run_id": run_id})


@pytest.mark.parametrize("run_id", ["a", "0", "Run-1_b.c", "a" * 128])
def test_ordinary_run_ids_are_accepted(run_id: str) -> None:
    assert parse({"run_id": run_id}, where="x").run_id == run_id


def test_lease_is_a_quarter_of_a_step_and_at_least_one_prompt() -> None:
    assert parse({"grpo": {"num_prompts_per_step": 32}}, where="x").lease_prompts == 8
    assert parse({"grpo": {"num_prompts_per_step": 3}}, where="x").lease_prompts == 1
    assert parse({"generation": {"lease_prompts": 5}}, where="x").lease_prompts == 5


def test_the_kind_of_a_pool_decides_its_keys() -> None:
    assert isinstance(parse({"pool": {"kind": "local"}}, where="x").pool, LocalPool)
    external = parse({"pool": {"kind": "external", "urls": ["http://a:1"]}}, where="x").pool
    assert isinstance(external, ExternalPool) and external.urls == ("http://a:1",)
    assert "engines" in refusal({"pool": {"kind": "external", "urls": ["http://a:1"], "engines": 2}})


def test_rewards_may_come_from_the_environment_alone() -> None:
    config = parse({"rewards": {"functions": []}, "environment": {"kind": "reasoning_gym"}}, where="x")
    assert config.rewards.functions == () and config.environment.kind == "reasoning_gym"


@pytest.mark.parametrize(
    ("dtype", "wire", "asked", "tolerance"),
    [
        ("float32", "float32", None, 1e-4),
        ("float32", "bfloat16", None, 0.1),
        ("bfloat16", "float32", None, 0.3),
        ("bfloat16", "bfloat16", None, 0.3),
        ("bfloat16", "bfloat16", 0.01, 0.01),
        ("float32", "float32", 0.01, 0.01),
    ],
)
def test_the_canary_is_as_strict_as_the_coarsest_precision_allows(
    dtype: str, wire: str, asked: float | None, tolerance: float
) -> None:
    values = {"model": {"dtype": dtype}, "refit": {"wire_dtype": wire, "canary_tolerance": asked}}
    assert parse(values, where="test").canary_tolerance == tolerance


NAMED: list[Callable[[Any], dict[str, Any]]] = [
    lambda given: {"rewards": {"functions": [{"function": given}]}},
    lambda given: {"rewards": {"functions": [given]}},
    lambda given: {"generation": {"tools": [{"function": given}]}},
    lambda given: {"generation": {"tools": [given]}},
    lambda given: {"environment": {"kind": "python", "factory": given}},
    lambda given: {"environment": {"kind": "verifiers", "loader": given}},
    lambda given: {"data": {"source": {"kind": "stream", "function": given}}},
]


@pytest.mark.parametrize("section", NAMED, ids=lambda section: str(section("m:f")))
def test_what_another_process_must_import_is_given_by_its_name(section: Callable[[Any], dict[str, Any]]) -> None:
    assert parse(section("m:f.g"), where="recipe.yaml")
    for nameless in ("lambda completions: [0.0]", lambda completions: [0.0], "m:f.<locals>.g", "m:<lambda>"):
        said = refusal(section(nameless))
        assert "no name by which another process could import it" in said and "give module:function" in said
    assert "does not say where a function is found; give module:function" in refusal(section("brevity"))


def test_a_reward_function_may_be_given_by_its_name_alone() -> None:
    (function,) = parse({"rewards": {"functions": ["m:f"]}}, where="recipe.yaml").rewards.functions
    assert (function.function, function.weight) == ("m:f", 1.0)


def test_a_ratio_to_the_engines_policy_corrects_for_its_age() -> None:
    objective = {"proximal_policy": "behaviour", "importance_correction": "none"}
    assert parse({"objective": objective}, where="recipe.yaml").objective.corrects


def test_what_a_sequence_can_hold_is_a_turn_or_the_turns_of_a_rollout() -> None:
    def most(**generation: Any) -> int:
        return parse({"generation": {"max_completion_length": 100, **generation}}, where="recipe.yaml").most_generated

    assert most() == 100
    assert most(max_rollout_length=60) == 60
    assert most(max_rollout_length=300) == 100
    assert most(tools=["m:f"]) == 4096
    assert most(tools=["m:f"], max_rollout_length=300) == 300


def numbers_without_a_bound(section: type[BaseModel]) -> Iterator[str]:
    """Keys of a section, and of those in it, whose number may be as large or as small as can be."""
    schema = section.model_json_schema()
    for named in [schema, *schema.get("$defs", {}).values()]:
        for key, described in named.get("properties", {}).items():
            for kind in [described, *described.get("anyOf", ())]:
                bounded = all(
                    {bound, f"exclusive{bound.capitalize()}"} & kind.keys() for bound in ("minimum", "maximum")
                )
                if kind.get("type") in ("integer", "number") and not bounded:
                    yield f"{named['title']}.{key}"


def test_every_number_has_a_least_and_a_largest_value() -> None:
    assert list(numbers_without_a_bound(RunConfig)) == []
