"""The names of everything in a run's store: the only place that spells a path.

Keys are relative to the run's root and use `/`. A key is a pure function of numbers decided before writing,
so no two writers ever need to agree on one; the parsers are the exact inverses. Directories of numbered names
hold at most 1000 numbers each (`lease // 1000`, `step // 1000`), which bounds every listing. Prefixes end in `/`,
except `parts_of`, which ends inside a file name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from storage.errors import InvalidKey

DIRECTORY_SIZE = 1000

_SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+@-]{0,127}")
_WORD = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_ATTEMPT = re.compile(r"attempts/(\d{6,})\.json")
_LEASE = re.compile(r"leases/(\d{6,})/\d{6,}/lease-(\d{9,})\.json")
_PART = re.compile(r"trajectories/(\d{6,})/\d{6,}/lease-(\d{9,})\.part-(\d{3,})\.parquet")
_LEDGER = re.compile(r"ledger/(\d{6,})/\d{6,}/step-(\d{9,})(?:\.drops-(\d{3,}))?\.parquet")
_PROMPT_CHUNK = re.compile(r"prompts/\d{6,}/chunk-(\d{9,})\.parquet")
_CHECKPOINT = re.compile(r"checkpoints/(\d{6,})/step-(\d{9,})/")
_WEIGHTS = re.compile(r"weights/(\d{6,})/version-(\d{9,})/")
_METRICS = re.compile(r"metrics/(\d{6,})/\d{6,}/chunk-(\d{9,})\.parquet")
_EVALUATION = re.compile(r"evaluations/(\d{6,})/version-(\d{9,})(?:\.([a-z0-9_-]+))?\.parquet")


@dataclass(frozen=True, slots=True, order=True)
class LeaseName:
    attempt: int
    lease: int


@dataclass(frozen=True, slots=True, order=True)
class PartName:
    attempt: int
    lease: int
    part: int


@dataclass(frozen=True, slots=True)
class LedgerName:
    """A ledger file: the record of a step, or (`drops` set) decisions made while waiting for that step."""

    attempt: int
    step: int
    drops: int | None = None

    @property
    def written_order(self) -> tuple[int, int, bool, int]:
        """Sorts files as they were written: the drops of a step come before the step itself."""
        return (self.attempt, self.step, self.drops is None, self.drops or 0)


@dataclass(frozen=True, slots=True, order=True)
class CheckpointName:
    attempt: int
    step: int


@dataclass(frozen=True, slots=True, order=True)
class VersionName:
    """A version of an attempt, such as that of published weights."""

    attempt: int
    version: int


@dataclass(frozen=True, slots=True, order=True)
class MetricsName:
    """The metrics of a stretch of an attempt's steps."""

    attempt: int
    chunk: int


@dataclass(frozen=True, slots=True)
class EvaluationName:
    attempt: int
    version: int
    name: str | None = None


def run_root(root: str, run_id: str) -> str:
    """The URL under which all state of a run lives. Raise InvalidKey unless `run_id` is one plain path segment."""
    if not _SEGMENT.fullmatch(run_id):
        raise InvalidKey(
            f"Run id {run_id!r} is not usable as a directory name: "
            "use letters, digits and . _ = + @ -, starting with a letter or digit, at most 128 characters."
        )
    return f"{root.rstrip('/')}/{run_id}"


def run() -> str:
    return "run.json"


def attempts_prefix() -> str:
    return "attempts/"


def attempt(attempt: int) -> str:
    return f"attempts/{_number(attempt, 6)}.json"


def parse_attempt(key: str) -> int | None:
    match = _ATTEMPT.fullmatch(key)
    return int(match[1]) if match else None


def progress(attempt: int, who: str) -> str:
    """A mutable hint, overwritten as `who` makes progress; nothing is decided by it alone."""
    return f"attempts/{_number(attempt, 6)}.{_word(who)}.json"


def goal(attempt: int) -> str:
    """The flow's word to the trainer of this attempt that the run has reached its goal."""
    return f"attempts/{_number(attempt, 6)}.goal.json"


def leases_prefix(attempt: int) -> str:
    return f"leases/{_number(attempt, 6)}/"


def leases_directory(attempt: int, lease: int) -> str:
    return f"{leases_prefix(attempt)}{_directory(lease)}/"


def lease(attempt: int, lease: int) -> str:
    return f"{leases_directory(attempt, lease)}lease-{_number(lease, 9)}.json"


def parse_lease(key: str) -> LeaseName | None:
    match = _LEASE.fullmatch(key)
    return LeaseName(int(match[1]), int(match[2])) if match else None


def prompt_log_prefix() -> str:
    return "prompts/"


def prompt_chunk(chunk: int) -> str:
    """Part of the record of a streaming dataset; it belongs to the run and not to an attempt."""
    return f"{prompt_log_prefix()}{_directory(chunk)}/chunk-{_number(chunk, 9)}.parquet"


def prompt_log_end() -> str:
    return f"{prompt_log_prefix()}END.json"


def parse_prompt_chunk(key: str) -> int | None:
    match = _PROMPT_CHUNK.fullmatch(key)
    return int(match[1]) if match else None


def trajectories_prefix(attempt: int | None = None) -> str:
    return "trajectories/" if attempt is None else f"trajectories/{_number(attempt, 6)}/"


def parts_prefix(attempt: int, lease: int) -> str:
    """The directory that holds the parts of `lease` and of its up to 999 neighbours."""
    return f"{trajectories_prefix(attempt)}{_directory(lease)}/"


def parts_of(attempt: int, leases: Iterable[int]) -> list[str]:
    """The tightest listing prefix per directory that covers every part of `leases`; it may cover neighbours too."""
    names: dict[str, list[str]] = {}
    for number in leases:
        names.setdefault(parts_prefix(attempt, number), []).append(f"lease-{_number(number, 9)}.part-")
    return [directory + _common_beginning(inside) for directory, inside in sorted(names.items())]


def part(attempt: int, lease: int, part: int) -> str:
    return f"{parts_prefix(attempt, lease)}lease-{_number(lease, 9)}.part-{_number(part, 3)}.parquet"


def parse_part(key: str) -> PartName | None:
    match = _PART.fullmatch(key)
    return PartName(int(match[1]), int(match[2]), int(match[3])) if match else None


def ledger_prefix(attempt: int | None = None) -> str:
    return "ledger/" if attempt is None else f"ledger/{_number(attempt, 6)}/"


def ledger_directory(attempt: int, step: int) -> str:
    return f"{ledger_prefix(attempt)}{_directory(step)}/"


def ledger_step(attempt: int, step: int) -> str:
    return f"{ledger_directory(attempt, step)}step-{_number(step, 9)}.parquet"


def drops(attempt: int, step: int, drops: int) -> str:
    return f"{ledger_directory(attempt, step)}step-{_number(step, 9)}.drops-{_number(drops, 3)}.parquet"


def ledger(name: LedgerName) -> str:
    if name.drops is None:
        return ledger_step(name.attempt, name.step)
    return drops(name.attempt, name.step, name.drops)


def parse_ledger(key: str) -> LedgerName | None:
    match = _LEDGER.fullmatch(key)
    if match is None:
        return None
    return LedgerName(int(match[1]), int(match[2]), None if match[3] is None else int(match[3]))


def metrics_prefix(attempt: int) -> str:
    return f"metrics/{_number(attempt, 6)}/"


def metrics(name: MetricsName) -> str:
    """Derived from the ledger and overwritten while its steps come in."""
    return f"{metrics_prefix(name.attempt)}{_directory(name.chunk)}/chunk-{_number(name.chunk, 9)}.parquet"


def parse_metrics(key: str) -> MetricsName | None:
    match = _METRICS.fullmatch(key)
    return MetricsName(int(match[1]), int(match[2])) if match else None


def pool_prefix(attempt: int) -> str:
    return f"pool/{_number(attempt, 6)}/"


def pool_change(attempt: int, change: int) -> str:
    return f"{pool_prefix(attempt)}change-{_number(change, 6)}.json"


def pool_wish(wish: int) -> str:
    """One record per wish of a person to add or remove engines; it outlives the attempt that took it in."""
    return f"pool/wishes/wish-{_number(wish, 6)}.json"


def checkpoints_prefix(attempt: int | None = None) -> str:
    return "checkpoints/" if attempt is None else f"checkpoints/{_number(attempt, 6)}/"


def checkpoint(attempt: int, step: int) -> str:
    return f"{checkpoints_prefix(attempt)}step-{_number(step, 9)}/"


def parse_checkpoint(prefix: str) -> CheckpointName | None:
    match = _CHECKPOINT.fullmatch(prefix)
    return CheckpointName(int(match[1]), int(match[2])) if match else None


def manifest(attempt: int, step: int) -> str:
    return f"{checkpoint(attempt, step)}MANIFEST.json"


def weights_prefix(attempt: int | None = None) -> str:
    return "weights/" if attempt is None else f"weights/{_number(attempt, 6)}/"


def weights(attempt: int, version: int) -> str:
    return f"{weights_prefix(attempt)}version-{_number(version, 9)}/"


def weights_digests(attempt: int, version: int) -> str:
    return f"{weights(attempt, version)}DIGESTS.json"


def parse_weights(prefix: str) -> VersionName | None:
    match = _WEIGHTS.fullmatch(prefix)
    return VersionName(int(match[1]), int(match[2])) if match else None


def refits_prefix(attempt: int) -> str:
    return f"refits/{_number(attempt, 6)}/"


def refit(attempt: int, version: int, number: int = 0) -> str:
    """One record per completed refit. Number 0 says that `version` is live;
    the next ones name engines that joined late."""
    late = "" if number == 0 else f".late-{_number(number, 3)}"
    return f"{refits_prefix(attempt)}version-{_number(version, 9)}{late}.json"


def evaluations_prefix(attempt: int | None = None) -> str:
    return "evaluations/" if attempt is None else f"evaluations/{_number(attempt, 6)}/"


def evaluation(attempt: int, version: int, name: str | None = None) -> str:
    """`name` tells several held-out sets apart."""
    suffix = "" if name is None else f".{_word(name)}"
    return f"{evaluations_prefix(attempt)}version-{_number(version, 9)}{suffix}.parquet"


def parse_evaluation(key: str) -> EvaluationName | None:
    match = _EVALUATION.fullmatch(key)
    return EvaluationName(int(match[1]), int(match[2]), match[3]) if match else None


def asset(name: str, partition: str) -> str:
    """The record of one partition of an asset."""
    return f"assets/{_word(name)}/{_word(partition)}.json"


def _common_beginning(names: list[str]) -> str:
    first, last = min(names), max(names)
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:length]


def _directory(number: int) -> str:
    return _number(number // DIRECTORY_SIZE, 6)


def _number(value: int, digits: int) -> str:
    if value < 0:
        raise InvalidKey(f"Number {value} cannot be part of a store path: attempts, leases and steps count from 0.")
    return f"{value:0{digits}d}"


def _word(text: str) -> str:
    if not _WORD.fullmatch(text):
        raise InvalidKey(f"Name {text!r} cannot be part of a store path: use lower-case letters, digits, _ and -.")
    return text
