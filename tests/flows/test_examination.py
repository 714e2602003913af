"""An engine that somebody else started serves a run only if it was started as the run needs it."""

import re
from typing import Any

import pytest

from flows.examination import fault_of
from grpo_core.config import RunConfig
from tests.fake_engine import server_info

CONFIG = RunConfig.model_validate(
    {"model": {"dtype": "float32", "context_length": 512}, "generation": {"max_completion_length": 100}}
)
ADAPTERS = RunConfig.model_validate({"model": {"lora": {"rank": 16}}, "refit": {"adapter_only": True}})


def with_adapters(rank: int) -> dict[str, Any]:
    info = server_info()
    info["vllm_config"]["lora_config"] = {"max_lora_rank": rank}
    return info


def test_an_engine_that_was_started_as_the_run_needs_it_has_no_fault() -> None:
    assert fault_of(server_info("float32", 512), CONFIG) is None
    assert fault_of(server_info("float32", 4096), CONFIG) is None
    assert fault_of(with_adapters(16), ADAPTERS) is None


@pytest.mark.parametrize(
    ("configuration", "config", "said"),
    [
        (server_info("float32", 512, logprobs_mode="raw_logprobs"), CONFIG, "--logprobs-mode raw_logprobs"),
        (server_info("float16", 512), CONFIG, r"torch\.float16; start it with --dtype float32"),
        (server_info("float32", 511), CONFIG, r"--max-model-len 511; .*model\.context_length=512"),
        (server_info("float32", 512, "nccl"), CONFIG, r"by nccl; .*\"gloo\""),
        (server_info(), ADAPTERS, "rank None; start it with --enable-lora and --max-lora-rank 16"),
        (with_adapters(8), ADAPTERS, "rank 8; .*--max-lora-rank 16"),
    ],
)
def test_what_would_spoil_the_run_is_named_with_its_flag(configuration: Any, config: RunConfig, said: str) -> None:
    assert re.search(said, str(fault_of(configuration, config)))


@pytest.mark.parametrize("answer", [None, [], "x", {}, {"vllm_config": None}, {"vllm_config": {"model_config": 3}}])
def test_an_engine_that_does_not_say_how_it_was_started_is_not_believed(answer: Any) -> None:
    assert "VLLM_SERVER_DEV_MODE=1" in str(fault_of(answer, CONFIG))


@pytest.mark.parametrize("section", ["weight_transfer_config", "lora_config"])
@pytest.mark.parametrize("value", [None, [], "x", {}, {"backend": [], "max_lora_rank": "16"}])
def test_nonsense_in_any_part_is_a_fault_and_no_error(section: str, value: Any) -> None:
    info = with_adapters(16)
    info["vllm_config"][section] = value
    assert fault_of(info, ADAPTERS) is not None
