"""How much of the window is used: as little as keeps the trainer busy, because what waits in the buffer only ages.

By Little's law the mean lag of a run is (rollouts in flight + rollouts buffered) ÷ rollouts per step. The window says
how much may be open; here is decided how much is worth to be. The trainer tells, with each step, how many admissible
groups it found at the moment it could begin: fewer than a step's means that it waited, many more means that they lay
about. Pure: no clock is asked, so the same rule serves the flow and the simulator.

Invariants: the limit lies between one step's groups and what the window allows; a shortage raises it at once by what
was short, a surplus lowers it by half of what was too much, so that it forgets a stall faster than it believes in calm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Supply:
    """`limit`: the most ordinals that are to be open; `floor` and `ceiling` bound it; `reserve`: groups beyond one
    step's that may lie ready without being a surplus."""

    limit: int
    floor: int
    ceiling: int
    reserve: int

    @classmethod
    def of(cls, *, prompts_per_step: int, ceiling: int) -> Supply:
        """Begin with all that the window allows: an empty buffer is the dearest mistake. A quarter of a step is kept in
        reserve."""
        return cls(
            limit=ceiling,
            floor=min(prompts_per_step, ceiling),
            ceiling=ceiling,
            reserve=max(1, prompts_per_step // 4),
        )

    def after_step(self, *, ready: int, wanted: int) -> Supply:
        """The supply after a step of `wanted` groups that found `ready` admissible ones when it could begin."""
        if ready < wanted:
            limit = self.limit + max(1, wanted - ready)
        else:
            limit = self.limit - max(0, ready - wanted - self.reserve + 1) // 2
        return replace(self, limit=min(self.ceiling, max(self.floor, limit)))
