"""The first turn of siblings: one request for all whose prompt is the same."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from grpo_core.trajectory import Turn

Ask = Callable[[Sequence[int], int, int], Awaitable[Sequence[Turn | Exception]]]


class FirstTurns:
    """Where `count` siblings meet. `ask(ids, n, number)` gets n turns for a prompt, or for each why it is none;
    `number` tells the requests apart.

    Each sibling calls `turn` or `give_up`, once; when the last has done so, the requests are sent. Normally that is
    one: siblings differ in their prompts only when their environment opens differently for the same seed.
    """

    def __init__(self, count: int, ask: Ask) -> None:
        self._missing = count
        self._ask = ask
        self._waiting: dict[tuple[int, ...], list[asyncio.Future[Turn]]] = {}
        self._requests: list[asyncio.Task[None]] = []

    async def turn(self, ids: Sequence[int]) -> Turn:
        """This sibling's turn; raises what stands in its place, or what `ask` raised."""
        future: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tuple(ids), []).append(future)
        self._arrived()
        return await future

    def give_up(self) -> None:
        """This sibling has no prompt; the others go on without it."""
        self._arrived()

    async def close(self) -> None:
        """Cancel what is still asked for."""
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)

    def _arrived(self) -> None:
        self._missing -= 1
        if self._missing == 0:
            self._requests = [
                asyncio.ensure_future(self._request(number, ids, futures))
                for number, (ids, futures) in enumerate(self._waiting.items())
            ]

    async def _request(self, number: int, ids: tuple[int, ...], futures: list[asyncio.Future[Turn]]) -> None:
        try:
            turns = await self._ask(ids, len(futures), number)
        except Exception as error:  # noqa: BLE001 - each sibling raises it
            for future in futures:
                if not future.done():
                    future.set_exception(error)
            return
        for future, turn in zip(futures, turns, strict=True):
            if future.done():
                continue
            if isinstance(turn, Turn):
                future.set_result(turn)
            else:
                future.set_exception(turn)
