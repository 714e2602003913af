"""Conversations are rendered by the policy's own template, and every way to end a turn is known."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from grpo_core.rollout.chat import Chat, ChatError
from tests.grpo_core import tiny
from tests.grpo_core.rollout import templates
from tests.grpo_core.rollout.templates import chat_with, spelled

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


@pytest.mark.parametrize("prompt", ["plain text", ["plain", "text"], [None]])
def test_a_prompt_that_is_no_conversation_is_refused_and_never_rendered_empty(policy: Path, prompt: Any) -> None:
    with pytest.raises(ChatError, match="give a list of role/content messages"):
        Chat(policy, {}).render(prompt)


def answer(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def followed(chat: Chat, text: str, added: list[dict[str, Any]], **fields: Any) -> tuple[list[int], list[int], str]:
    """Prompt and answer of a first turn, the second turn's prompt, and its text."""
    first = chat.prompt(QUESTION)
    output = spelled(chat, text)
    second = chat.next_prompt(first, output, [*QUESTION, answer(text, **fields)], added)
    return [*first.ids, *output], second.ids, second.text


FEEDBACK = [{"role": "user", "content": "Once more."}]


@pytest.mark.parametrize("template", [None, templates.TOOLS, templates.STRIPS])
def test_what_was_generated_is_never_tokenized_again(policy: Path, tmp_path: Path, template: str | None) -> None:
    chat = chat_with(policy, tmp_path / "chat", template)
    held, ids, text = followed(chat, " 1 plus 2 plus 3 ", FEEDBACK)
    assert ids[: len(held)] == held
    assert chat.text(ids[len(held) :]) == "\nuser\nOnce more.\nassistant\n"
    # The letters are kept as they were spelled, though the tokenizer knows shorter ways.
    assert len(chat._encoded(text)) < len(ids)


def test_a_call_that_the_template_writes_out_otherwise_is_kept_as_it_was_generated(
    policy: Path, tmp_path: Path
) -> None:
    chat = chat_with(policy, tmp_path / "chat", templates.TOOLS)
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    first = chat.prompt(QUESTION)
    output = spelled(chat, '<tool_call>{"arguments":{"a":1},"name":"f"}</tool_call>')
    second = chat.next_prompt(
        first, output, [*QUESTION, answer("", tool_calls=[call])], [{"role": "tool", "content": "3"}]
    )
    assert second.ids[: len(first.ids) + len(output)] == [*first.ids, *output]
    assert chat.text(second.ids[len(first.ids) + len(output) :]) == "\ntool\n3\nassistant\n"


def test_where_the_template_drops_the_reasoning_the_prompt_is_what_it_says(policy: Path, tmp_path: Path) -> None:
    chat = chat_with(policy, tmp_path / "chat", templates.DROPS_REASONING)
    held, ids, text = followed(chat, "<think>two</think>3", FEEDBACK)
    assert ids[: len(held)] != held and "think" not in chat.text(ids)
    assert "".join(chat.pieces(ids)) == text
    kept_held, kept, _ = followed(chat, "<think>two</think>3", [{"role": "tool", "content": "3"}])
    assert kept[: len(kept_held)] == kept_held


def test_where_the_template_changes_the_beginning_all_of_it_is_rendered(policy: Path, tmp_path: Path) -> None:
    chat = chat_with(policy, tmp_path / "chat", templates.COUNTS)
    _, ids, text = followed(chat, "3", FEEDBACK)
    assert "".join(chat.pieces(ids)) == text and text.startswith("turns:3")


def test_another_end_of_turn_than_the_templates_gives_way_to_it(copy: Path) -> None:
    generation_config(copy, eos_token_id=[0])
    chat = Chat(copy, {})
    own, other = chat._encoded("<|im_end|>")[0], 0
    assert set(chat.stop_token_ids) == {own, other}
    first = chat.prompt(QUESTION)
    output = [*spelled(chat, "1 plus 2", ended=False), other]
    ids = chat.next_prompt(first, output, [*QUESTION, answer("1 plus 2")], FEEDBACK).ids
    held = [*first.ids, *output[:-1]]
    assert ids[: len(held) + 1] == [*held, own]
    assert chat.raw_text(output) == "1 plus 2"


@pytest.mark.parametrize("words_after", ["", " So I ask."])
def test_a_call_that_ended_by_another_end_of_turn_is_kept_as_it_was_generated(
    policy: Path, copy: Path, words_after: str
) -> None:
    generation_config(copy, eos_token_id=[0])
    (copy / "chat_template.jinja").write_text(templates.TOOLS)
    chat = Chat(copy, {})
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    first = chat.prompt(QUESTION)
    said = spelled(chat, '<tool_call>{"arguments":{"a":1},"name":"f"}</tool_call>' + words_after, ended=False)
    answered = [*QUESTION, answer(words_after.strip(), tool_calls=[call])]
    ids = chat.next_prompt(first, [*said, 0], answered, [{"role": "tool", "content": "3"}]).ids
    held = [*first.ids, *said]
    assert ids[: len(held)] == held
    assert "".join(chat.pieces(ids[len(held) :])) == (
        "<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_leaves_a_message_out_is_refused(policy: Path, tmp_path: Path) -> None:
    chat = chat_with(policy, tmp_path / "chat", templates.NO_TOOLS)
    with pytest.raises(ChatError, match="leaves out messages of role tool"):
        followed(chat, "3", [{"role": "tool", "content": "3"}])
