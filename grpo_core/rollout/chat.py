"""Messages to token ids and back, with the policy's own chat template.

Imports neither torch nor a model class of transformers: the flow tokenizes, and must start within a second or two.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


class ChatError(ValueError):
    """A conversation that cannot be rendered for this policy."""


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

    def render(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation, ending where the assistant is to speak. Raise ChatError."""
        try:
            rendered: Any = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=True, **self._arguments
            )
        except TemplateError as error:
            raise ChatError(f"the chat template refuses {list(messages)!r}: {error}; change the prompt") from error
        ids = list(rendered["input_ids"])
        if not ids:
            raise ChatError(
                f"the chat template rendered nothing for {list(messages)!r}; give a list of role/content messages"
            )
        return ids

    def text(self, ids: Sequence[int]) -> str:
        """What the assistant said, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token, special tokens included."""
        return [str(self._tokenizer.decode([token])) for token in ids]

    def digest(self) -> str:
        """Content key of vocabulary and template: a continued run must tokenize alike."""
        content = [sorted(self._tokenizer.get_vocab().items()), self._tokenizer.chat_template, self._arguments]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


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
