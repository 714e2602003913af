"""Conversations are rendered by the policy's own template, and every way to end a turn is known."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from grpo_core.rollout.chat import Chat, ChatError
from tests.grpo_core import tiny

QUESTION = [{"role": "user", "content": "What is 1 plus 2?"}]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("policy") / "tiny")


@pytest.fixture
def copy(policy: Path, tmp_path: Path) -> Path:
    shutil.copytree(policy, tmp_path / "copy", ignore=shutil.ignore_patterns("*.safetensors"))
    return tmp_path / "copy"


def generation_config(directory: Path, **fields: Any) -> None:
    (directory / "generation_config.json").write_text(json.dumps(fields))


def tokenizer_config(directory: Path, **fields: Any) -> None:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({k: v for k, v in (json.loads(path.read_text()) | fields).items() if v is not None}))


def test_a_conversation_ends_where_the_assistant_speaks(policy: Path) -> None:
    chat = Chat(policy, {})
    ids = chat.render(QUESTION)
    assert "".join(chat.pieces(ids)) == "<|im_start|>user\nWhat is 1 plus 2?<|im_end|>\n<|im_start|>assistant\n"
    assert all(0 <= token < chat.vocabulary_size for token in ids)
    assert chat.text(ids) == "user\nWhat is 1 plus 2?\nassistant\n"


def test_every_end_of_turn_is_known(copy: Path) -> None:
    own = Chat(copy, {}).stop_token_ids
    assert len(own) == 1
    generation_config(copy, eos_token_id=[7, 5, own[0]])
    assert Chat(copy, {}).stop_token_ids == tuple(sorted({7, 5, own[0]}))
    generation_config(copy, eos_token_id=9)
    assert Chat(copy, {}).stop_token_ids == tuple(sorted({9, own[0]}))
    generation_config(copy)
    assert Chat(copy, {}).stop_token_ids == own
    (copy / "generation_config.json").unlink()
    assert Chat(copy, {}).stop_token_ids == own


def test_a_policy_that_cannot_end_a_turn_is_refused(copy: Path) -> None:
    tokenizer_config(copy, eos_token=None)
    generation_config(copy)
    with pytest.raises(ChatError, match="end-of-sequence"):
        Chat(copy, {})


def test_a_tokenizer_without_a_template_is_refused(copy: Path) -> None:
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(ChatError, match="no chat template"):
        Chat(copy, {})


def test_an_empty_rendering_is_refused(copy: Path) -> None:
    (copy / "chat_template.jinja").write_text("{% for message in messages %}{% endfor %}")
    with pytest.raises(ChatError, match="rendered nothing"):
        Chat(copy, {}).render(QUESTION)


def test_a_template_that_refuses_the_conversation_is_quoted(copy: Path) -> None:
    (copy / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatError, match="roles must alternate"):
        Chat(copy, {}).render(QUESTION)


def test_template_arguments_reach_the_template_and_the_digest(copy: Path) -> None:
    (copy / "chat_template.jinja").write_text("{{ messages[0]['content'] }}{% if think %} think{% endif %}")
    plain, thinking = Chat(copy, {}), Chat(copy, {"think": True})
    assert thinking.text(thinking.render(QUESTION)) == plain.text(plain.render(QUESTION)) + " think"
    assert plain.digest() != thinking.digest()
    assert plain.digest() == Chat(copy, {}).digest()
