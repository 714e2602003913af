"""Text of rollouts on its way to a terminal or a page: shown as it is, obeyed never.

A rollout may hold escape sequences, rich markup, or characters that reverse the direction of what follows. Here the
invisible ones become visible; markup is harmless in a `Text`.
"""

import unicodedata

from rich.text import Text

KEPT = "\n\t"


def visible(text: str) -> str:
    """`text` with every control, format, surrogate and private character but line breaks and tabs written as ‹U+…›."""
    return "".join(
        letter
        if letter in KEPT or unicodedata.category(letter) not in ("Cc", "Cf", "Cs", "Co")
        else f"‹U+{ord(letter):04X}›"
        for letter in text
    )


def plain(value: object, style: str = "") -> Text:
    """Anything as literal text; a dash for None."""
    return Text("–" if value is None else visible(str(value)), style=style)


def figure(value: float | None, digits: int = 3) -> str:
    """A number for people; a dash for None."""
    return "–" if value is None else f"{value:,.{digits}f}"
