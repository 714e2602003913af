"""One rollout under way: what was said, and the exact tokens of it.

Contract: the caller asks an engine for `prompt.ids` with at most `budget` tokens and hands the turn to `take`, until
`finish_reason` is set. `take` runs the tools that the answer calls, asks the environment, and makes the next prompt.

Invariants: a turn's prompt begins with the ids of the turn before, prompt and output, unless the chat template writes
history anew (see `rollout.chat`); a turn cut off by its budget ends the rollout, and so does a prompt that no longer
fits: both as `length`, whatever was reached till then stays and is scored. A call beyond
generation.max_tool_calling_iterations is not made and ends the rollout as `tool_calls`. The environment sees every
answer that is not made of calls of other tools alone, and the last one of these rollouts too, without its calls. What
tools and environment say is cut at LONGEST_MESSAGE characters, and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_core.config import RunConfig
from grpo_core.rollout.chat import Chat, ChatError, Message, PromptText
from grpo_core.rollout.effort import UsageTally
from grpo_core.rollout.environment_output import tool_name
from grpo_core.rollout.environments import Opening
from grpo_core.rollout.episodes import Episode
from grpo_core.rollout.tool_calls import Answer, ToolCall, parse_answer
from grpo_core.rollout.tools import Toolbox, ToolResult
from grpo_core.trajectory import LENGTH, TOOL_CALLS, Rollout, Turn

# Characters. To tokenize one message of so many takes about a tenth of a second, for which all other rollouts wait.
LONGEST_MESSAGE = 1 << 16


@dataclass(slots=True)
class Conversation:
    """A rollout that may have further turns. Begin one with `begin`."""

    config: RunConfig
    chat: Chat
    toolbox: Toolbox
    episode: Episode | None
    environment_tools: frozenset[str]
    schemas: tuple[dict[str, Any], ...]
    messages: list[Message]
    prompt: PromptText
    opening_messages: int
    turns: list[Turn] = field(default_factory=list)
    finish_reason: str | None = None
    tool_rounds: int = 0
    tool_calls: int = 0
    tool_failures: int = 0
    tool_seconds: float = 0.0
    unknown_tool_calls: int = 0
    malformed_tool_calls: int = 0
    tool_usage: UsageTally = field(default_factory=UsageTally)

    @classmethod
    def begin(
        cls,
        config: RunConfig,
        chat: Chat,
        toolbox: Toolbox,
        messages: Sequence[Message],
        episode: Episode | None = None,
        opening: Opening | None = None,
    ) -> Conversation:
        """The conversation before the first answer. Raise ChatError."""
        opening = opening or Opening()
        schemas = (*toolbox.schemas, *opening.tools)
        own = frozenset(map(tool_name, opening.tools))
        if both := own & toolbox.tools.keys():
            raise ChatError(
                f"generation.tools and the environment both have a tool called {min(both)}; rename one of them"
            )
        opened = joined(messages, opening.messages)
        return cls(
            config, chat, toolbox, episode, own, schemas, opened, chat.prompt(opened, schemas), len(opened)
        )  # fmt: skip

    @property
    def budget(self) -> int:
        """Tokens the next answer may have; below 1 there is no room for one."""
        generation = self.config.generation
        left = [generation.max_completion_length, self.config.model.context_length - len(self.prompt.ids)]
        if generation.max_rollout_length is not None:
            left.append(generation.max_rollout_length - sum(len(turn.output_ids) for turn in self.turns))
        return min(left)

    async def take(self, turn: Turn) -> None:
        """Take in an answer to `prompt`. Raise ChatError, or EnvironmentFailed."""
        self.turns.append(turn)
        answer = self._parsed(turn)
        self.messages.append(_assistant(answer, len(self.turns)))
        if turn.finish_reason == LENGTH:
            await self._last_step(answer)
            self.finish_reason = LENGTH
            return
        limit = self.config.generation.max_tool_calling_iterations
        if answer.calls and limit is not None and self.tool_rounds >= limit:
            await self._last_step(answer)
            self.finish_reason = TOOL_CALLS
            return
        added = [_shortened(message) for message in await self._answered(answer)]
        if not added:
            self.finish_reason = turn.finish_reason
            return
        answered = list(self.messages)
        self.messages += added
        self.prompt = self.chat.next_prompt(self.prompt, turn.output_ids, answered, added, self.schemas)
        if self.budget < 1:
            self.finish_reason = LENGTH

    def rollout(self, index: int, reward: float | None) -> Rollout:
        """The finished rollout."""
        assert self.finish_reason is not None
        return Rollout(
            index,
            self.turns,
            self.messages,
            self.finish_reason,
            self.turns[0].seed,
            tool_calls=self.tool_calls,
            tool_failures=self.tool_failures,
            tool_seconds=self.tool_seconds,
            opening_messages=self.opening_messages,
            environment_reward=reward,
            tool_rounds=self.tool_rounds,
            unknown_tool_calls=self.unknown_tool_calls,
            malformed_tool_calls=self.malformed_tool_calls,
            tool_usage=self.tool_usage.usages(),
            environment_usage=() if self.episode is None else self.episode.usage.usages(),
        )

    def _parsed(self, turn: Turn) -> Answer:
        if not self.schemas or turn.finish_reason == LENGTH:
            return Answer(self.chat.text(turn.output_ids))
        answer = parse_answer(self.chat.raw_text(turn.output_ids), self.config.generation.tool_format)
        return answer if answer.calls else Answer(self.chat.text(turn.output_ids))

    async def _answered(self, answer: Answer) -> list[Message]:
        """What tools and environment say to an answer; nothing when the rollout is over."""
        theirs = [call for call in answer.calls if call.name in self.environment_tools]
        numbered = [
            (number, call) for number, call in enumerate(answer.calls) if call.name not in self.environment_tools
        ]
        self.tool_rounds += bool(answer.calls)
        self.tool_calls += len(answer.calls)
        added = await self._tool_messages(numbered)
        if self.episode is not None and (theirs or not answer.calls):
            step = await self.episode.step(_assistant(Answer(answer.content, tuple(theirs)), len(self.turns)))
            if step.done or not (step.messages or added):
                return []
            added += step.messages
        return added

    async def _tool_messages(self, calls: Sequence[tuple[int, ToolCall]]) -> list[Message]:
        results = await self.toolbox.call_all([call for _, call in calls])
        self.tool_failures += sum(result.failed for result in results)
        # Side by side, so a round takes as long as its slowest call.
        self.tool_seconds += max((result.seconds for result in results), default=0.0)
        for (_, call), result in zip(calls, results, strict=True):
            self._count(call, result)
        return [
            {
                "role": "tool",
                "tool_call_id": _call_id(len(self.turns), number),
                **({"name": call.name} if call.name else {}),
                "content": result.content,
            }
            for (number, call), result in zip(calls, results, strict=True)
        ]

    def _count(self, call: ToolCall, result: ToolResult) -> None:
        """Count a call that was ours to make. Names that no tool has are the policy's, and any text."""
        if call.fault is not None:
            self.malformed_tool_calls += 1
        elif call.name not in self.toolbox.tools:
            self.unknown_tool_calls += 1
        else:
            self.tool_usage.add(call.name, result.seconds, failed=result.failed)

    async def _last_step(self, answer: Answer) -> None:
        """Let the environment see an answer after which the rollout ends whatever it says:
        it may be worth something."""
        if self.episode is not None:
            await self.episode.step(_assistant(Answer(answer.content), len(self.turns)))


def joined(messages: Sequence[Message], added: Sequence[Message]) -> list[Message]:
    """The dataset's messages and what the environment says at its reset. Two messages of one role in a row, which many
    templates refuse, become one."""
    if not messages or not added:
        return [*messages, *added]
    last, first = messages[-1], added[0]
    if last["role"] != first["role"] or not isinstance(last["content"], str):
        return [*messages, *added]
    return [*messages[:-1], {**last, "content": f"{last['content']}\n\n{first['content']}"}, *added[1:]]


def _shortened(message: Message) -> Message:
    content = message["content"]
    if len(content) <= LONGEST_MESSAGE:
        return message
    note = f"\n[cut: the first {LONGEST_MESSAGE} of {len(content)} characters]"
    return {**message, "content": content[:LONGEST_MESSAGE] + note}


def _assistant(answer: Answer, turn: int) -> Message:
    message: Message = {"role": "assistant", "content": answer.content}
    named = [(number, call) for number, call in enumerate(answer.calls) if call.name]
    if named:
        message["tool_calls"] = [
            {
                "id": _call_id(turn, number),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in named
        ]
    return message


def _call_id(turn: int, number: int) -> str:
    """Nine letters or digits, which is what Mistral's templates ask for."""
    return f"t{turn:04d}c{number:03d}"
