"""The engine's command line has what an exact run needs, and refuses what the engine would die of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from grpo_core.config.pool import FLOW_ARGUMENTS
from grpo_core.rollout.launch import EngineSpec, LaunchError, engine_command

CPU = EngineSpec(
    model="/models/tiny",
    host="127.0.0.1",
    port=8301,
    device="cpu",
    dtype="float32",
    seed=101,
    max_model_len=256,
    max_num_seqs=8,
    max_num_batched_tokens=512,
    tensor_parallel_size=1,
    transfer="gloo",
    block_size=32,
    kv_cache_bytes=1 << 25,
)
GPU = replace(
    CPU, device="cuda", transfer="nccl", kv_cache_bytes=None, gpu_memory_utilization=0.8, gpus=(2, 3),
    tensor_parallel_size=2,
)  # fmt: skip


def value(arguments: tuple[str, ...], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def test_cpu_engine_is_started_as_a_module_with_all_that_exactness_needs() -> None:
    command = engine_command(CPU, {"PATH": "/bin"}, python="python3")
    assert command.arguments[:3] == ("python3", "-m", "vllm.entrypoints.openai.api_server")
    assert value(command.arguments, "--host") == "127.0.0.1"
    assert value(command.arguments, "--logprobs-mode") == "processed_logprobs"
    assert value(command.arguments, "--generation-config") == "vllm"
    assert value(command.arguments, "--scheduling-policy") == "priority"
    assert value(command.arguments, "--weight-transfer-config") == '{"backend": "gloo"}'
    assert value(command.arguments, "--kv-cache-memory-bytes") == "33554432"
    assert value(command.arguments, "--seed") == "101"
    assert "--enable-scale-out" in command.arguments
    assert "--no-enable-chunked-prefill" in command.arguments
    assert command.environment["PATH"] == "/bin"
    assert command.environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert command.environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_gpu_engine_sees_its_own_gpus_and_keeps_chunked_prefill() -> None:
    command = engine_command(GPU, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    assert command.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert value(command.arguments, "--tensor-parallel-size") == "2"
    assert value(command.arguments, "--gpu-memory-utilization") == "0.8"
    assert "--no-enable-chunked-prefill" not in command.arguments
    assert "VLLM_CPU_OMP_THREADS_BIND" not in command.environment


def test_api_key_is_in_the_environment_only() -> None:
    command = engine_command(CPU, {"VLLM_API_KEY": "secret"})
    assert command.environment["VLLM_API_KEY"] == "secret"
    assert "secret" not in " ".join(command.arguments)


def test_plugin_is_added_to_a_list_of_plugins_that_would_leave_it_out() -> None:
    assert "VLLM_PLUGINS" not in engine_command(CPU, {}).environment
    assert engine_command(CPU, {"VLLM_PLUGINS": "lora,other"}).environment["VLLM_PLUGINS"] == "lora,other,forebay"


def test_pickled_handles_are_accepted_by_ipc_engines_only() -> None:
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in engine_command(GPU, {}).environment
    assert engine_command(replace(GPU, transfer="ipc"), {}).environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"


def test_extra_arguments_come_last_and_extra_environment_wins() -> None:
    spec = replace(CPU, extra_arguments=("--foo", "1"), extra_environment=(("VLLM_SERVER_DEV_MODE", "2"),))
    command = engine_command(spec, {})
    assert command.arguments[-2:] == ("--foo", "1")
    assert command.environment["VLLM_SERVER_DEV_MODE"] == "2"


def test_whatever_the_flow_gives_an_engine_nobody_else_may_give_it() -> None:
    specs = [CPU, GPU, replace(CPU, transfer="store", lora_rank=8, enforce_eager=True), replace(GPU, kv_cache_bytes=1)]
    given = {word for spec in specs for word in engine_command(spec, {}).arguments if word.startswith("--")}
    assert given == FLOW_ARGUMENTS


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (replace(CPU, kv_cache_bytes=None), "kv_cache_bytes"),
        (replace(CPU, block_size=16), "block_size 16"),
        (replace(CPU, max_num_batched_tokens=128), "max_num_batched_tokens 128"),
        (replace(GPU, tensor_parallel_size=4), "tensor_parallel_size 4"),
    ],
)
def test_spec_that_cannot_work_is_refused_by_name(spec: EngineSpec, named: str) -> None:
    with pytest.raises(LaunchError, match=named):
        engine_command(spec, {})


def test_the_recipe_of_several_machines_starts_its_engines_with_these_flags() -> None:
    spec = replace(GPU, block_size=None, gpus=(), enforce_eager=False)
    command = engine_command(spec, {"PATH": "/bin"}, python="python")
    recipe = Path(__file__).parents[3] / "deployments" / "recipes" / "multi_node.yaml"
    comment = " ".join(line.strip("# \\") for line in recipe.read_text().splitlines() if line.startswith("#"))
    shown = {word for word in comment[comment.index("VLLM_SERVER_DEV_MODE") :].split() if word.startswith("--")}
    assert shown == {argument for argument in command.arguments if argument.startswith("--")}
    assert all(f"{name}={value}" in comment for name, value in command.environment.items() if name != "PATH")


def test_engines_that_fetch_from_the_store_can_be_asked_how_far_they_are() -> None:
    command = engine_command(replace(CPU, transfer="store"), {})
    assert value(command.arguments, "--weight-transfer-config") == '{"backend": "store"}'
    module, _, name = value(command.arguments, "--worker-extension-cls").rpartition(".")
    assert (module, name) == ("grpo_core.refit.store_worker", "StagingExtension")
    assert "--worker-extension-cls" not in engine_command(CPU, {}).arguments


@pytest.mark.parametrize(("rank", "room"), [(1, "1"), (4, "8"), (16, "16"), (300, "320"), (512, "512")])
def test_engine_for_adapters_may_load_them_while_it_runs(rank: int, room: str) -> None:
    command = engine_command(replace(CPU, lora_rank=rank), {})
    assert "--enable-lora" in command.arguments
    assert value(command.arguments, "--max-lora-rank") == room
    assert command.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in engine_command(CPU, {}).environment


def test_an_adapter_wider_than_engines_have_room_for_is_refused() -> None:
    with pytest.raises(LaunchError, match="lora_rank 513 is above 512"):
        engine_command(replace(CPU, lora_rank=513), {})
