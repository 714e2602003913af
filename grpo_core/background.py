"""Calls on threads that can never keep the process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Answer = TypeVar("Answer")


def call_in_background(call: Callable[[], Answer], *, name: str | None = None) -> Future[Answer]:
    """Run `call` in a daemon thread of this name. Its outcome is in the future."""
    future: Future[Answer] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the future
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
