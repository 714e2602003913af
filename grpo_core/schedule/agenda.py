"""Which versions are to be evaluated, and what became of those that were due. Pure.

While training goes on, one version in `period` is due. Its evaluation begins with whatever version is live by then, for
versions can pass while another evaluation runs, or several at once: so an evaluation of version v serves the newest due
version at or before v, and is kept as what it is, one of v. A due version that the next one overtook before anything
served it is missed. So each due version is served once, or known to be missed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from grpo_core.config import EvaluationConfig, RefitConfig


@dataclass(frozen=True, slots=True)
class Agenda:
    """`period`: versions from one due evaluation to the next, None: none while training goes on. In every method `known`
    are the versions that were evaluated, are being evaluated, or were due and are known to be missed."""

    period: int | None
    at_end: bool

    @classmethod
    def of(cls, evaluation: EvaluationConfig, refit: RefitConfig) -> Agenda:
        every = evaluation.every_steps
        return cls(None if every is None else every // refit.every_steps, evaluation.at_end)

    def owed(self, version: int, known: Collection[int]) -> bool:
        """Whether a due evaluation is still to begin while `version` is live."""
        return self.period is not None and version >= self.period and not self._served(version, known)

    def overtaken(self, version: int, known: Collection[int]) -> list[int]:
        """The due versions, ascending, that can only be missed now that `version` is live."""
        if self.period is None:
            return []
        due = range(self.period, version // self.period * self.period, self.period)
        return [each for each in due if not self._served(each, known)]

    def owed_at_end(self, version: int, known: Collection[int]) -> bool:
        """Whether `version`, the run's last, is still to be evaluated."""
        return (self.at_end and version not in known) or self.owed(version, known)

    def _served(self, version: int, known: Collection[int]) -> bool:
        return any(each // self.period == version // self.period for each in known) if self.period else False
