"""`forebay gc`: what retention no longer needs, shown and deleted.

Contract: the rules are those of `storage.garbage`, with the retention of the run's own config. Safe beside a living
run: whatever a new attempt could need is left, and a claim in the middle ends the collection. A dry run writes nothing.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from flows.views.standing import recorded_run
from flows.views.terminal import figure, plain
from grpo_core.evaluation import with_evaluation_metric
from storage.garbage import GRACE_SECONDS, Garbage, Retention, collect, select, survey
from storage.layout import CheckpointName
from storage.objects import ObjectStore

SHOWN = ("kind", "name", "reason", "objects", "bytes")


@dataclass(frozen=True, slots=True)
class Collection:
    """What went, or in a dry run would go. `unreadable`: checkpoints whose manifest says nothing, which hold back the
    leases of their attempts and of older ones until somebody removes them."""

    garbage: tuple[Garbage, ...] = ()
    unreadable: tuple[CheckpointName, ...] = ()
    dry_run: bool = False

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.garbage)

    def as_json(self) -> dict[str, Any]:
        items = [{name: value for name, value in asdict(item).items() if name in SHOWN} for item in self.garbage]
        unreadable = [f"{name.attempt}/{name.step}" for name in self.unreadable]
        return {"dry_run": self.dry_run, "bytes": self.bytes, "garbage": items, "unreadable": unreadable}

    def line(self) -> str:
        """The whole of it in one sentence."""
        verb = "would be deleted" if self.dry_run else "deleted"
        objects = sum(item.objects for item in self.garbage)
        return f"{objects} objects, {figure(self.bytes / 2**20, 1)} MiB, {verb}"


def collect_garbage(store: ObjectStore, *, now: float, dry_run: bool = False) -> Collection:
    """Find what can go at `now`, in Unix seconds, and delete it. Raise RunRefused when there is no run, and Fenced when
    a new attempt was claimed meanwhile; then what is left goes the next time."""
    config = recorded_run(store).config
    contents = survey(store)
    if contents is None:
        return Collection(dry_run=dry_run)
    settings = config.checkpointing
    manifests = with_evaluation_metric(store, list(contents.manifests.values()), config)
    contents = replace(contents, manifests={manifest.name: manifest for manifest in manifests})
    garbage = select(
        contents,
        Retention(settings.keep_last, settings.keep_top_k, settings.metric_name, settings.higher_is_better),
        now=now,
        grace_seconds=max(GRACE_SECONDS, config.generation.lease_timeout_seconds),
    )
    if not dry_run:
        collect(store, garbage, attempt=contents.attempt)
    return Collection(tuple(garbage), tuple(sorted(contents.unreadable)), dry_run)


def render_collection(found: Collection) -> RenderableType:
    """For people: one line for each kind and reason."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in ("what", "reason", "count", "objects", "MiB"):
        table.add_column(name, justify="left" if name in ("what", "reason") else "right")
    for (kind, reason), each in groupby(sorted(found.garbage, key=_sort), key=lambda item: (item.kind, item.reason)):
        items = list(each)
        size = figure(sum(item.bytes for item in items) / 2**20, 1)
        cells = (kind, reason, len(items), sum(item.objects for item in items), size)
        table.add_row(*(plain(cell) for cell in cells))
    return Group(*([table] if found.garbage else []), plain(found.line()), *_warnings(found.unreadable))


def _sort(item: Garbage) -> tuple[str, str, str]:
    return (item.kind, item.reason, item.name)


def _warnings(unreadable: Iterable[CheckpointName]) -> list[RenderableType]:
    return [
        plain(
            f"the manifest of checkpoint {name.attempt}/{name.step} cannot be read: no lease of attempt {name.attempt} "
            "or an older one is collected until the checkpoint is restored or removed",
            "yellow",
        )
        for name in unreadable
    ]
