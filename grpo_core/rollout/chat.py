"""Messages to token ids and back, with the policy's own chat template.

What the policy generated is never tokenized again: a later prompt is the ids held so far and the ids of what the
template adds to them. Only where the template writes an earlier message anew, such as one that drops the reasoning of
past answers, the prompt is what the template says, and `rollout.reconcile` decides what is kept.

Imports neither torch nor a model class of transformers: the flow tokenizes, and must start within a second or two.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

Message = dict[str, Any]


class ChatError(ValueError):
    """A conversation that cannot be rendered for this policy."""


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt as the template renders it, and the ids that stand for it in its conversation."""

    text: str
    ids: list[int]


class Chat:
    """The tokenizer of a policy directory. Thread-safe for reading."""

    def __init__(self, directory: Path, template_arguments: dict[str, Any]) -> None:
        self._tokenizer = _tokenizer(directory)
        if self._tokenizer.chat_template is None:
            raise ChatError(
                f"the tokenizer in {directory} has no chat template; add chat_template.jinja to the directory"
            )
        self._arguments = template_arguments
        self.stop_token_ids = _stop_token_ids(directory, self._tokenizer.eos_token_id)
        self.vocabulary_size = len(self._tokenizer)

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[int]:
        """Token ids of a conversation, ending where the assistant is to speak. Raise ChatError."""
        return self.prompt(messages, tools).ids

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> PromptText:
        """The first prompt of a conversation; `tools` are JSON schemas. Raise ChatError."""
        text = self._rendered(messages, tools)
        ids = self._encoded(text)
        if not ids:
            raise ChatError(
                f"the chat template rendered nothing for {list(messages)!r}; give a list of role/content messages"
            )
        return PromptText(text, ids)

    def next_prompt(
        self,
        held: PromptText,
        output_ids: Sequence[int],
        answered: Sequence[Message],
        added: Sequence[Message],
        tools: Sequence[Message] = (),
    ) -> PromptText:
        """The prompt after the answer `output_ids` to `held`. Raise ChatError.

        `answered` is the conversation up to the answer, `added` the messages after it. The ids begin with those of
        `held` and the answer, unless the template renders something of them differently now.
        """
        whole = self._rendered([*answered, *added], tools)
        closed = self._rendered(answered, tools, speaking=False)
        if whole == self._rendered(answered, tools):
            roles = ", ".join(sorted({str(message.get("role")) for message in added}))
            raise ChatError(f"the chat template leaves out messages of role {roles}; use one that renders them")
        if whole.startswith(closed) and closed.startswith(held.text):
            answer, after = closed[len(held.text) :], whole[len(closed) :]
            kept = output_ids[: len(output_ids) - (output_ids[-1] in self.stop_token_ids)]
            if (end := self._end_of_turn(answer, output_ids[-1])) is not None:
                # The end of the turn goes in and comes out again, so that what follows is tokenized as it is there.
                # Where the turn ended by another token than the template's, the template's takes its place.
                return PromptText(whole, [*held.ids, *kept, *self._encoded(answer[end:] + after)])
            said = self.raw_text(output_ids)
            if answer.startswith(said):
                return PromptText(whole, [*held.ids, *kept, *self._encoded(answer[len(said) :] + after)])
        if whole.startswith(held.text):
            return PromptText(whole, [*held.ids, *self._encoded(whole[len(held.text) :])])
        return PromptText(whole, self._encoded(whole))

    def _end_of_turn(self, answer: str, ended_by: int) -> int | None:
        """Where the template ends an answer's turn: at the token that the answer ended by,
        or else at any that ends turns."""
        for tokens in ((ended_by,), self.stop_token_ids):
            ends = [str(self._tokenizer.decode([token])) for token in tokens if token in self.stop_token_ids]
            if (last := max((answer.rfind(end) for end in ends if end), default=-1)) >= 0:
                return last
        return None

    def text(self, ids: Sequence[int]) -> str:
        """What the assistant said, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def raw_text(self, ids: Sequence[int]) -> str:
        """What the assistant said, special tokens included, but for the one that ended its turn."""
        ended = bool(ids) and ids[-1] in self.stop_token_ids
        return str(self._tokenizer.decode(list(ids[:-1] if ended else ids)))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token, special tokens included."""
        return [str(self._tokenizer.decode([token])) for token in ids]

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Message], *, speaking: bool = True) -> str:
        if isinstance(messages, str) or not all(isinstance(message, dict) for message in messages):
            raise ChatError(f"the prompt is {messages!r}; give a list of role/content messages")
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=speaking,
                tokenize=False,
                **self._arguments,
            )
        except Exception as error:  # a template is foreign code, and raises what it likes
            raise ChatError(f"the chat template refuses {list(messages)!r}: {error}; change the prompt") from error
        return well_formed(str(text))

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def digest(self) -> str:
        """Content key of vocabulary and template: a continued run must tokenize alike."""
        content = [sorted(self._tokenizer.get_vocab().items()), self._tokenizer.chat_template, self._arguments]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def well_formed(text: str) -> str:
    """The text with U+FFFD for every half of a surrogate pair. One of them, as a policy may write it in JSON, can
    neither be tokenized nor stored."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    if (directory / "tokenizer.json").exists():
        return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    # Only an Auto class knows how to convert the older formats, and it imports torch and every model's configuration.
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    return tokenizer


def _stop_token_ids(directory: Path, eos: int | None) -> tuple[int, ...]:
    """Every id that ends a turn: the tokenizer's and those of the generation config, which may be several."""
    ends = {eos} if eos is not None else set()
    generation_config = directory / "generation_config.json"
    if generation_config.exists():
        declared = json.loads(generation_config.read_text(encoding="utf-8")).get("eos_token_id")
        ends |= set(declared if isinstance(declared, list) else [declared]) - {None}
    if not ends:
        raise ChatError(
            f"neither the tokenizer nor generation_config.json in {directory} names an end-of-sequence token; add one"
        )
    return tuple(sorted(ends))
