"""What a group cost beside the tokens that it is trained with: counted where it happens, while the group is made."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from grpo_core.trajectory import Usage


@dataclass(slots=True)
class UsageTally:
    """Calls by name: of the tools of a rollout, or of the methods of its environment."""

    found: dict[str, Usage] = field(default_factory=dict)

    def add(self, name: str, seconds: float, *, failed: bool = False) -> None:
        held = self.found.get(name, Usage(name))
        self.found[name] = replace(
            held, calls=held.calls + 1, failures=held.failures + failed, seconds=held.seconds + seconds
        )

    def usages(self) -> tuple[Usage, ...]:
        """In order of the first call."""
        return tuple(self.found.values())


@dataclass(slots=True)
class Effort:
    """`failed_requests`: those that an engine lost, refused or answered unusably, each made again within its budget;
    `aborted_requests`: those that were cut off because they had become too old to be trained on; `discarded_tokens`: of
    whole turns that were thrown away, because their rollout was begun again or failed, or their group did."""

    failed_requests: int = 0
    aborted_requests: int = 0
    discarded_tokens: int = 0
