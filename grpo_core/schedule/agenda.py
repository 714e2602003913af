"""Which versions are to be evaluated, and what became of those that were due. Pure.

While training goes on, one version in `period` is due. Its evaluation begins with whatever version is live by then, for
versions can pass while another evaluation runs, or several at once, and the weights of those are gone: so an evaluation
of version v serves every due version up to v that none before it served, and is kept as what it is, one of v. So each
due version is served once, by itself or by the next version that could be evaluated, and none is lost.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from grpo_core.config import EvaluationConfig, RefitConfig


@dataclass(frozen=True, slots=True)
class Agenda:
    """`period`: versions from one due evaluation to the next, None: none while training goes on. In every method
    `evaluated` are the versions that were evaluated or are being evaluated, in any order."""

    period: int | None
    at_end: bool

    @classmethod
    def of(cls, evaluation: EvaluationConfig, refit: RefitConfig) -> Agenda:
        every = evaluation.every_steps
        return cls(None if every is None else every // refit.every_steps, evaluation.at_end)

    def due(self, version: int, evaluated: Collection[int]) -> range:
        """The due versions, ascending, that an evaluation of `version` would serve; empty when nothing is due."""
        if self.period is None:
            return range(0)
        first = (max(evaluated, default=0) // self.period + 1) * self.period
        return range(first, version + 1, self.period)

    def owed_at_end(self, version: int, evaluated: Collection[int]) -> bool:
        """Whether `version`, the run's last, is still to be evaluated."""
        return (self.at_end and version not in evaluated) or bool(self.due(version, evaluated))
