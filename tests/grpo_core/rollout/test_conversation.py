"""Turns of a rollout: what is said between them, when it is over, and that its tokens are those that were generated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_core.config import RunConfig, ToolFunction
from grpo_core.recipe import parse
from grpo_core.rollout import conversation as conversation_module
from grpo_core.rollout.chat import Chat, ChatError
from grpo_core.rollout.conversation import Conversation, joined
from grpo_core.rollout.environments import Opening, Step
from grpo_core.rollout.episodes import Episode
from grpo_core.rollout.reconcile import Tally, reconcile
from grpo_core.rollout.tools import Toolbox
from grpo_core.trajectory import Turn, VersionSpan
from tests.grpo_core import tiny
from tests.grpo_core.rollout import templates
from tests.grpo_core.rollout.sample_environments import Counting
from tests.grpo_core.rollout.templates import chat_with, spelled

PROMPT = [{"role": "user", "content": "What is 1 plus 2?"}]
SAMPLES = "tests.grpo_core.rollout.sample_tools"
TOOLS = tuple(ToolFunction(function=f"{SAMPLES}:{name}") for name in ("calculator", "sleep", "shrink"))
NONE = Toolbox.of((), timeout_seconds=1)


def call(expression: str, name: str = "calculator") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{"expression": "{expression}"}}}}</tool_call>'


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("policy") / "tiny")


@pytest.fixture
def chat(policy: Path, tmp_path: Path) -> Chat:
    return chat_with(policy, tmp_path / "chat", templates.TOOLS)


@pytest.fixture(autouse=True)
def _none_made() -> None:
    Counting.made.clear()


def config(context: int = 2048, **generation: Any) -> RunConfig:
    return parse(
        {
            "model": {"context_length": context},
            "packing": {"token_budget": 4096},
            "generation": {"max_completion_length": min(256, context - 1), **generation},
        },
        where="test",
    )


def begin(chat: Chat, *, tools: tuple[ToolFunction, ...] = TOOLS, **generation: Any) -> Conversation:
    return Conversation.begin(config(**generation), chat, Toolbox.of(tools, timeout_seconds=5), PROMPT)


async def said(conversation: Conversation, text: str, *, finish_reason: str = "stop") -> Turn:
    """Let the policy say `text` in tokens that no tokenizer would choose."""
    ids = spelled(conversation.chat, text, ended=finish_reason == "stop")
    spans = (VersionSpan(1, len(conversation.turns), 0, len(ids)),)
    turn = Turn(list(conversation.prompt.ids), ids, [-0.5] * len(ids), spans, finish_reason)
    await conversation.take(turn)
    return turn


async def test_trained_tokens_are_exactly_the_generated_ones(chat: Chat) -> None:
    conversation = begin(chat)
    turns = [
        await said(conversation, call("1 + 2")),
        await said(conversation, call("3+4")),
        await said(conversation, "7"),
    ]
    assert conversation.finish_reason == "stop"
    rollout = conversation.rollout(0, None)
    (sequence,), tally = reconcile(rollout.turns)
    assert tally == Tally(clean=2)
    trained = [token for token, mask in zip(sequence.ids, sequence.mask, strict=True) if mask]
    assert trained == [token for turn in turns for token in turn.output_ids]
    for number, span in enumerate(sequence.spans):
        assert span.version == number
        assert sequence.ids[span.start : span.end] == turns[number].output_ids
    assert sequence.ids[: sequence.prompt_length] == turns[0].prompt_ids
    context = [token for token, mask in zip(sequence.ids, sequence.mask, strict=True) if not mask]
    assert "tool\n3" in chat.text(context) and "tool\n7" in chat.text(context)
    assert (rollout.tool_calls, rollout.tool_failures) == (2, 0)
    assert [message["role"] for message in rollout.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    made = rollout.messages[1]["tool_calls"][0]
    assert made["function"] == {"name": "calculator", "arguments": {"expression": "1 + 2"}}
    assert rollout.messages[2]["tool_call_id"] == made["id"] and len(made["id"]) == 9


async def test_the_calls_of_one_answer_are_answered_in_their_order(chat: Chat) -> None:
    conversation = begin(chat)
    await said(conversation, call("1+1") + "<tool_call>{no</tool_call>" + call("2+2", "divide"))
    tools = [message for message in conversation.messages if message["role"] == "tool"]
    assert tools[0]["content"] == "2"
    assert "not JSON" in json.loads(tools[1]["content"])["error"] and "name" not in tools[1]
    assert "no tool 'divide'" in json.loads(tools[2]["content"])["error"]
    assert (conversation.tool_calls, conversation.tool_failures, conversation.tool_rounds) == (3, 2, 1)
    assert (conversation.malformed_tool_calls, conversation.unknown_tool_calls) == (1, 1)
    assert [(use.name, use.calls, use.failures) for use in conversation.tool_usage.usages()] == [("calculator", 1, 0)]
    assert conversation.finish_reason is None


async def test_an_answer_without_a_call_ends_the_rollout(chat: Chat) -> None:
    conversation = begin(chat)
    await said(conversation, "3")
    assert conversation.finish_reason == "stop" and conversation.messages[-1] == {"role": "assistant", "content": "3"}


async def test_without_tools_a_call_is_only_text(chat: Chat) -> None:
    conversation = begin(chat, tools=())
    await said(conversation, call("1+1"))
    assert conversation.finish_reason == "stop" and conversation.messages[-1]["content"] == call("1+1")


@pytest.mark.parametrize(("limit", "rounds"), [(0, 0), (1, 1), (2, 2)])
async def test_a_call_beyond_the_limit_ends_the_rollout(chat: Chat, limit: int, rounds: int) -> None:
    conversation = begin(chat, max_tool_calling_iterations=limit)
    while conversation.finish_reason is None:
        await said(conversation, call("1+1"))
    assert conversation.finish_reason == "tool_calls"
    assert len(conversation.turns) == rounds + 1 and conversation.tool_calls == rounds


async def test_a_cut_off_answer_ends_the_rollout_and_calls_nothing(chat: Chat) -> None:
    conversation = begin(chat)
    await said(conversation, call("1+1"), finish_reason="length")
    assert conversation.finish_reason == "length" and conversation.tool_calls == 0


async def test_the_budget_is_that_of_turn_rollout_and_context(chat: Chat) -> None:
    prompt = len(begin(chat).prompt.ids)
    assert begin(chat).budget == 256
    assert begin(chat, context=prompt + 40).budget == 40
    conversation = begin(chat, max_rollout_length=100)
    assert conversation.budget == 100
    first = await said(conversation, call("1+1"))
    assert conversation.budget == 100 - len(first.output_ids)
    second = await said(conversation, call("1+1")[:-1])
    assert len(first.output_ids) + len(second.output_ids) > 100
    assert conversation.budget < 1 and conversation.finish_reason == "length"


async def test_a_prompt_that_outgrows_the_context_ends_the_rollout_as_truncated(chat: Chat) -> None:
    answer = len(spelled(chat, call("1+1")))
    conversation = begin(chat, context=len(begin(chat).prompt.ids) + answer + 3)
    await said(conversation, call("1+1"))
    assert conversation.finish_reason == "length"
    (sequence,), _ = reconcile(conversation.rollout(0, None).turns)
    assert sum(sequence.mask) == answer


async def test_reasoning_that_the_template_drops_forks_or_realigns_the_rollout(policy: Path, tmp_path: Path) -> None:
    chat = chat_with(policy, tmp_path / "reasons", templates.DROPS_REASONING)
    episode = Episode(Counting(), 5)
    opening = await episode.reset({}, 3)
    conversation = Conversation.begin(config(), chat, NONE, PROMPT, episode, opening)
    await said(conversation, "<think>one and two</think>3")
    await said(conversation, "4")
    assert conversation.finish_reason == "stop"
    turns = conversation.rollout(0, None).turns
    (sequence,), tally = reconcile(turns)
    assert tally.realign == 1 and "one and two" not in chat.text(sequence.ids)
    sequences, tally = reconcile(turns, fork_threshold_tokens=1)
    assert tally.fork == 1 and len(sequences) == 2


async def test_the_environment_speaks_between_the_turns_and_first(chat: Chat) -> None:
    environment = Counting(steps=3)
    episode = Episode(environment, 5)
    opening = await episode.reset({}, 3)
    conversation = Conversation.begin(config(), chat, NONE, PROMPT, episode, opening)
    assert conversation.messages == [{"role": "user", "content": "What is 1 plus 2?\n\ntask 3"}]
    assert "task 3" in chat.text(conversation.prompt.ids)
    for text in ("a", "b", "c"):
        assert conversation.finish_reason is None
        await said(conversation, text)
    assert conversation.finish_reason == "stop"
    assert [answer["content"] for answer in environment.answers] == ["a", "b", "c"]
    assert [message["content"] for message in conversation.messages[1:]] == ["a", "answer 1", "b", "answer 2", "c"]
    rollout = conversation.rollout(0, await episode.reward())
    assert (rollout.environment_reward, rollout.opening_messages) == (3.0, 1)


async def test_the_environment_sees_an_answer_that_was_cut_off(chat: Chat) -> None:
    environment = Counting(steps=3)
    episode = Episode(environment, 5)
    conversation = Conversation.begin(config(), chat, NONE, PROMPT, episode, await episode.reset({}, 3))
    await said(conversation, "a", finish_reason="length")
    assert conversation.finish_reason == "length" and await episode.reward() == 1.0


async def test_the_environment_sees_an_answer_whose_calls_are_beyond_the_limit(chat: Chat) -> None:
    environment = Counting(steps=3)
    episode = Episode(environment, 5)
    opening = await episode.reset({"word": "tools"}, 3)
    ours = Toolbox.of(TOOLS, timeout_seconds=5)
    limited = config(max_tool_calling_iterations=0)
    conversation = Conversation.begin(limited, chat, ours, PROMPT, episode, opening)
    await said(conversation, 'Look.<tool_call>{"name": "look", "arguments": {}}</tool_call>')
    assert conversation.finish_reason == "tool_calls" and conversation.tool_calls == 0
    assert environment.answers == [{"role": "assistant", "content": "Look."}]
    assert await episode.reward() == 1.0


@pytest.mark.parametrize("speaker", ["tool", "environment"])
async def test_a_message_too_long_to_tokenize_at_once_is_cut_and_says_so(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, speaker: str
) -> None:
    monkeypatch.setattr(conversation_module, "LONGEST_MESSAGE", 4)
    environment = Counting(steps=3)
    conversation = begin(chat)
    if speaker == "environment":
        episode = Episode(environment, 5)
        await episode.reset({}, 3)
        conversation = Conversation.begin(config(), chat, NONE, PROMPT, episode)
    await said(conversation, call("12345 + 0") if speaker == "tool" else "so?")
    cut = {
        "tool": "1234\n[cut: the first 4 of 5 characters]",
        "environment": "answ\n[cut: the first 4 of 8 characters]",
    }
    assert conversation.messages[-1]["content"] == cut[speaker]
    assert cut[speaker] in chat.text(conversation.prompt.ids)


async def test_tools_of_the_environment_are_its_own_to_answer(chat: Chat) -> None:
    environment = Counting(steps=3)
    episode = Episode(environment, 5)
    opening = await episode.reset({"word": "tools"}, 3)
    conversation = Conversation.begin(config(), chat, Toolbox.of(TOOLS, timeout_seconds=5), PROMPT, episode, opening)
    assert "look" in chat.text(conversation.prompt.ids) and "calculator" in chat.text(conversation.prompt.ids)
    look = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    await said(conversation, look + call("1+1"))
    (asked,) = environment.answers
    assert [made["function"]["name"] for made in asked["tool_calls"]] == ["look"]
    assert [message["content"] for message in conversation.messages[-2:]] == ["2", "answer 1"]
    await said(conversation, call("1+1"))
    assert len(environment.answers) == 1
    await said(conversation, "done?")
    assert len(environment.answers) == 2


async def test_a_tool_of_the_environment_must_not_be_called_like_one_of_ours(chat: Chat) -> None:
    opening = Opening(tools=({"type": "function", "function": {"name": "calculator"}},))
    ours = Toolbox.of(TOOLS, timeout_seconds=5)
    with pytest.raises(ChatError, match="both have a tool called calculator; rename one"):
        Conversation.begin(config(), chat, ours, PROMPT, Episode(Counting(), 5), opening)


async def test_neither_tools_nor_environment_can_change_what_was_said(chat: Chat) -> None:
    class Takes(Counting):
        async def step(self, answer: dict[str, Any]) -> Step:
            answer["tool_calls"][0]["function"]["arguments"].clear()
            return await super().step(answer)

    episode = Episode(Takes(), 5)
    opening = await episode.reset({"word": "tools"}, 3)
    conversation = Conversation.begin(config(), chat, Toolbox.of(TOOLS, timeout_seconds=5), PROMPT, episode, opening)
    look = '<tool_call>{"name": "look", "arguments": {"at": 3}}</tool_call>'
    shrink = '<tool_call>{"name": "shrink", "arguments": {"words": ["a", "b"]}}</tool_call>'
    await said(conversation, look + shrink)
    calls = [call["function"] for call in conversation.messages[1]["tool_calls"]]
    assert [call["arguments"] for call in calls] == [{"at": 3}, {"words": ["a", "b"]}]


async def test_half_a_surrogate_pair_in_a_call_is_no_end_of_the_rollout(chat: Chat) -> None:
    """JSON can name one; no tokenizer and no Parquet file takes it."""
    conversation = begin(chat)
    await said(conversation, call("\\ud800"))
    assert conversation.finish_reason is None
    assert "invalid literal" in conversation.messages[-1]["content"]
    conversation.prompt.text.encode()


async def test_a_template_without_tools_is_an_error_of_the_rollout(policy: Path, tmp_path: Path) -> None:
    conversation = begin(chat_with(policy, tmp_path / "no", templates.NO_TOOLS))
    with pytest.raises(ChatError, match="leaves out messages of role tool"):
        await said(conversation, call("1+1"))


@pytest.mark.parametrize(
    ("added", "contents"),
    [
        ([], ["q"]),
        ([{"role": "user", "content": "o"}], ["q\n\no"]),
        ([{"role": "system", "content": "o"}, {"role": "user", "content": "p"}], ["q", "o", "p"]),
    ],
)
def test_two_messages_of_one_role_become_one(added: list[dict[str, Any]], contents: list[Any]) -> None:
    prompt = [{"role": "user", "content": "q"}]
    assert [message["content"] for message in joined(prompt, added)] == contents
    assert prompt == [{"role": "user", "content": "q"}]
