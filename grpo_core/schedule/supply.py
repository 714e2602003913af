"""How much of the window is used: as little as keeps the trainer busy, because what waits in the buffer only ages.

By Little's law the mean lag of a run is (rollouts in flight + rollouts buffered) ÷ rollouts per step. The window says
how much may be open; here is decided how much is worth to be. The trainer tells, with each step, how many admissible
groups it found at the moment it could begin: fewer than a step's means that it waited, more means that some lay about.
Pure: no clock is asked, so the same rule serves the flow and the simulator.

Invariants: the limit lies between one step's groups and what the window allows; a shortage raises it at once, by what
was short and by no less than the reserve; it is lowered at most once in as many steps as the open groups make, which is
how long a change takes to be felt, and then by half of what lay about in every one of them. So a limit that is too low
costs a step or two, and waves of arrivals, which leave much at one step and nothing at the next, do not lower it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Supply:
    """`limit`: the most ordinals that are to be open; `floor` and `ceiling` bound it; `reserve`: groups beyond one
    step's that may lie ready without being a surplus; `spare`: the surplus at each step since the limit was last
    looked at."""

    limit: int
    floor: int
    ceiling: int
    reserve: int
    spare: tuple[int, ...] = ()

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
            return self._with(self.limit + max(self.reserve, wanted - ready))
        spare = (*self.spare, ready - wanted)
        if len(spare) * wanted < self.limit:
            return replace(self, spare=spare)
        return self._with(self.limit - max(0, min(spare) - self.reserve + 1) // 2)

    def _with(self, limit: int) -> Supply:
        return replace(self, limit=min(self.ceiling, max(self.floor, limit)), spare=())
