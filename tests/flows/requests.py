"""Counts what is asked of the store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from storage.objects import ObjectStore


def requests_of(action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> int:
    """How many requests `action` sends to stores, a listing counted as one."""
    count = 0
    call = ObjectStore._call

    def counted(self: ObjectStore, key: str, made: Callable[[Any], Any]) -> Any:
        nonlocal count
        count += 1
        return call(self, key, made)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "_call", counted)
        action()
    return count
