"""Seeds that follow from what they are for, so that nothing needs to remember them."""

from __future__ import annotations

import hashlib


def derived_seed(*parts: int) -> int:
    """A seed below 2⁶³ that is different for different parts."""
    text = ".".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
