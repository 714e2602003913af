"""Chat templates, as the models of the field have them, and text as the tokens of an answer."""

from __future__ import annotations

import shutil
from pathlib import Path

from grpo_core.rollout.chat import Chat

MESSAGE = "{{ '<|im_start|>' + message['role'] + '\\n' + content + '<|im_end|>' + '\\n' }}"
SPEAK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
CALLS = (
    "{%- for call in message.tool_calls or [] %}"
    "{{ '<tool_call>\\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '\\n</tool_call>' }}"
    "{%- endfor %}"
)
# Tools in a system message, calls written out again, as Qwen's.
TOOLS = (
    "{%- if tools %}{{ '<|im_start|>system\\nTools:' }}{% for tool in tools %}{{ tool.function.name }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}"
    + CALLS
    + "{{ '<|im_end|>\\n' }}{% endfor %}"
    + SPEAK
)
# The reasoning of all answers but those after the last user message is dropped, as Qwen3's.
DROPS_REASONING = (
    "{%- set last = namespace(user=-1) %}"
    "{%- for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for message in messages %}"
    "{%- set content = message.content %}"
    "{%- if message.role == 'assistant' and loop.index0 < last.user %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    + MESSAGE
    + "{% endfor %}"
    + SPEAK
)
# Space around an answer is dropped.
STRIPS = "{%- for message in messages %}{% set content = message.content | trim %}" + MESSAGE + "{% endfor %}" + SPEAK
# Messages of tools are left out.
NO_TOOLS = (
    "{%- for message in messages if message.role != 'tool' %}{% set content = message.content %}"
    + MESSAGE
    + "{% endfor %}"
    + SPEAK
)
# A conversation before this one is rendered anew each time.
COUNTS = (
    "{{ 'turns:' + (messages | length | string) + '\\n' }}{%- for message in messages %}{% set content = message.content %}"
    + MESSAGE
    + "{% endfor %}"
    + SPEAK
)


def chat_with(policy: Path, directory: Path, template: str | None = None) -> Chat:
    """A copy of the policy's tokenizer with another template."""
    shutil.copytree(policy, directory, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return Chat(directory, {})


def spelled(chat: Chat, text: str, *, ended: bool = True) -> list[int]:
    """The answer `text` letter by letter, as no tokenizer would write it, and the end of the turn."""
    ids = [token for letter in text for token in chat._encoded(letter)]
    return [*ids, *(chat.stop_token_ids[:1] if ended else ())]
