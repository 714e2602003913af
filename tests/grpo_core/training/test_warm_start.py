"""The supervised phase learns completions only, in the form rollouts have, and depends on its arguments alone."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_core.training import origin, warm_start

QUESTIONS = tuple(f"State the final answer: {a} + {b} =" for a in range(10) for b in range(10))
ENTRIES = [{"question": question, "answer": str(place % 10)} for place, question in enumerate(QUESTIONS)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = origin.TinyPolicy(
        texts=QUESTIONS,
        hidden_size=64,
        layers=2,
        heads=2,
        kv_heads=1,
        intermediate_size=96,
        vocabulary_size=320,
        tie_word_embeddings=True,
        seed=7,
        max_position_embeddings=64,
    )
    return origin.prepare(tiny, tmp_path_factory.mktemp("policies") / "policy")


def learn(policy: Path, output: Path, *, steps: int = 30, **changes: Any) -> dict[str, Any]:
    settings = {"batch_size": 16, "learning_rate": 3e-3, "seed": 1, "threads": 1, "report": lambda line: None}
    demonstrations = warm_start.demonstrations(ENTRIES, wrong_share=0.0, seed=0)
    return warm_start.run(policy, output, demonstrations, steps=steps, **(settings | changes))


def test_the_policy_learns_what_it_is_shown(policy: Path, tmp_path: Path) -> None:
    figures = learn(policy, tmp_path / "out", steps=80)
    assert figures["loss"][-1][1] < figures["loss"][0][1] / 2
    assert figures["loss"][-1][0] == 80
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    prompt, completion = warm_start.encode(tokenizer, [{"role": "user", "content": QUESTIONS[12]}], "2")
    logits = model(torch.tensor([prompt + completion])).logits[0]
    assert logits[len(prompt)].argmax() == tokenizer.eos_token_id


def test_same_arguments_give_the_same_weights_and_another_seed_does_not(policy: Path, tmp_path: Path) -> None:
    outputs = {}
    for name, seed in [("a", 1), ("b", 1), ("c", 2)]:
        torch.manual_seed(hash(name) % 1000)
        learn(policy, tmp_path / name, steps=4, seed=seed)
        outputs[name] = (tmp_path / name / "model.safetensors").read_bytes()
    assert outputs["a"] == outputs["b"]
    assert outputs["a"] != outputs["c"]


def test_a_complete_output_is_not_made_again(policy: Path, tmp_path: Path) -> None:
    learn(policy, tmp_path / "out", steps=2)
    before = (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns
    assert learn(policy, tmp_path / "out", steps=2)["loss"] == []
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == before


def test_thread_count_is_put_back(policy: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    learn(policy, tmp_path / "out", steps=1, threads=before + 1)
    assert torch.get_num_threads() == before


def test_no_demonstrations_are_refused(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(warm_start.WarmStartError, match="no demonstrations"):
        warm_start.run(policy, tmp_path / "out", [], steps=1, batch_size=1, learning_rate=1e-3, seed=0, threads=1)


def test_only_the_completion_and_its_end_are_learned() -> None:
    ids, labels = warm_start.collate([([5, 6, 7], [8, 2]), ([5], [9, 9, 9, 2])])
    assert labels.tolist() == [[-100, -100, 8, 2], [9, 9, 9, 2]]
    assert ids[0].tolist() == [5, 6, 7, 8]
    assert ids[1].tolist() == [5, 9, 9, 9]


def test_padding_does_not_change_what_a_row_learns(policy: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(policy)
    short, long = ([5, 6, 7], [8, 2]), ([5, 9, 11, 12, 13], [9, 2])
    alone, _ = warm_start.collate([short])
    padded, _ = warm_start.collate([short, long])
    width = alone.shape[1]
    torch.testing.assert_close(model(padded).logits[0, :width], model(alone).logits[0])


def test_every_pass_shows_each_example_once_and_in_its_own_order() -> None:
    examples = [([place], [place]) for place in range(10)]
    shown = [
        example[0][0] for batch in islice(warm_start.shuffled(examples, batch_size=5, seed=3), 4) for example in batch
    ]
    assert sorted(shown[:10]) == sorted(shown[10:]) == list(range(10))
    assert shown[:10] != shown[10:]


def test_batches_larger_than_the_data_are_filled() -> None:
    batch = next(warm_start.shuffled([([0], [0]), ([1], [1])], batch_size=5, seed=0))
    assert sorted(Counter(example[0][0] for example in batch).values()) in ([2, 3], [1, 4])


def test_wrong_share_of_the_demonstrations_is_one_too_high() -> None:
    entries = [{"question": "q", "answer": "-1"}] * 2000
    answers = Counter(answer for _, answer in warm_start.demonstrations(entries, wrong_share=0.6, seed=5))
    assert set(answers) == {"-1", "0"}
    assert abs(answers["0"] / 2000 - 0.6) < 0.05


@pytest.mark.parametrize(("right", "wrong"), [("9", "10"), ("-1", "0"), ("2.50", "3.50"), ("0", "1")])
def test_a_slip_keeps_the_form_of_the_number(right: str, wrong: str) -> None:
    assert warm_start.one_too_high(right) == wrong


def test_a_slip_of_something_that_is_no_number_is_refused() -> None:
    with pytest.raises(warm_start.WarmStartError, match="Friday"):
        warm_start.demonstrations([{"question": "q", "answer": "Friday"}], wrong_share=1.0, seed=0)
