"""How many failed groups in a row a run bears."""

from __future__ import annotations

from dataclasses import dataclass


class TooManyFailures(RuntimeError):
    """Generation failed more often in a row than is tolerated; the message names the first cause."""


@dataclass(slots=True)
class Tolerance:
    """`limit` failures in a row are borne: 0 means that the first is fatal. A good group forgives those before it, but
    nothing forgives once the limit was passed: from then on every call raises, with the cause that came first."""

    limit: int
    _in_a_row: int = 0
    _first_cause: str = ""

    def succeeded(self) -> None:
        """A group was generated. Raise TooManyFailures if it comes too late."""
        self._check()
        self._in_a_row = 0

    def failed(self, cause: str, count: int = 1) -> None:
        """`count` groups failed of `cause`. Raise TooManyFailures beyond the limit."""
        if self._in_a_row == 0:
            self._first_cause = cause
        self._in_a_row += count
        self._check()

    def _check(self) -> None:
        if self._in_a_row > self.limit:
            raise TooManyFailures(
                f"{self._in_a_row} groups failed in a row, more than grpo.async_grpo.max_generation_failures={self.limit}; "
                f"the first cause was: {self._first_cause}"
            )
