"""A few rollouts that show what a run does: the best, the worst, and some at random, from its whole length.

Contract: rewards come from a bounded number of ledger files spread over the living history, and only the parts of the
chosen rollouts are read; the choice depends on the run alone, so the same run gives the same samples.
"""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow.compute as pc

from flows.views.messages import message_text
from flows.views.series import spread
from flows.views.terminal import visible
from storage import layout, schema
from storage.errors import ObjectMissing
from storage.layout import LedgerName, PartName
from storage.ledger import TRAINED
from storage.objects import ObjectStore
from storage.trajectories import TrajectoryStore

Kind = Literal["best", "worst", "random"]
LEDGER_FILES = 24
WANTED: dict[Kind, int] = {"best": 2, "worst": 2, "random": 4}
COLUMNS = ("ordinal", "rollout", "messages", "min_version", "max_version", "finish_reason", "loss_mask")
LONGEST_TEXT = 4000


@dataclass(frozen=True, slots=True)
class Place:
    """A rollout that a step trained, and its reward."""

    step: int
    part: PartName
    ordinal: int
    rollout: int
    reward: float


@dataclass(frozen=True, slots=True)
class Sample:
    """A rollout to show. `messages` are (role, text) pairs, safe to show but not escaped; `versions` as text."""

    kind: Kind
    place: Place
    versions: str
    tokens: int
    finish_reason: str
    messages: tuple[tuple[str, str], ...]


def sample_rollouts(store: ObjectStore, names: Sequence[LedgerName]) -> list[Sample]:
    """Samples from these ledger files of steps: best, worst, then random by step.
    Parts already deleted are left out."""
    places = [place for index in spread(len(names), LEDGER_FILES) for place in _places(store, names[index])]
    samples = (_read(store, kind, place) for kind, place in choose(places))
    return [sample for sample in samples if sample is not None]


def choose(places: Sequence[Place]) -> list[tuple[Kind, Place]]:
    """Rollouts of each kind, no two of one ordinal; of equal rewards the latest is best, and the latest is worst."""
    drawn = random.Random(0).sample(places, len(places))
    orders: list[tuple[Kind, list[Place]]] = [
        ("best", sorted(places, key=lambda place: (-place.reward, -place.step, place.ordinal, place.rollout))),
        ("worst", sorted(places, key=lambda place: (place.reward, -place.step, place.ordinal, place.rollout))),
        ("random", drawn),
    ]
    chosen: list[tuple[Kind, Place]] = []
    ordinals: set[int] = set()
    for kind, ordered in orders:
        fresh = _first_of_each((place for place in ordered if place.ordinal not in ordinals), WANTED[kind])
        ordinals |= {place.ordinal for place in fresh}
        chosen += [
            (kind, place) for place in (sorted(fresh, key=lambda place: place.step) if kind == "random" else fresh)
        ]
    return chosen


def _first_of_each(places: Iterable[Place], wanted: int) -> list[Place]:
    """The first place of each ordinal, up to `wanted`."""
    found: dict[int, Place] = {}
    for place in places:
        if len(found) == wanted:
            break
        found.setdefault(place.ordinal, place)
    return list(found.values())


def _places(store: ObjectStore, name: LedgerName) -> list[Place]:
    key = layout.ledger(name)
    rows, _ = schema.decode(store.get(key), ["ordinal", "state", "lease_attempt", "lease", "part", "rewards"], name=key)
    return [
        Place(name.step, PartName(row["lease_attempt"], row["lease"], row["part"]), row["ordinal"], rollout, reward)
        for row in rows.to_pylist()
        if row["state"] == TRAINED
        for rollout, reward in enumerate(row["rewards"] or ())
        if reward is not None and reward == reward
    ]


def _read(store: ObjectStore, kind: Kind, place: Place) -> Sample | None:
    try:
        _, table = TrajectoryStore(store, place.part.attempt).read_part(place.part, COLUMNS)
    except ObjectMissing:
        return None  # gc deletes parts whose ordinals are all terminal
    rows = table.filter((pc.field("ordinal") == place.ordinal) & (pc.field("rollout") == place.rollout)).to_pylist()
    low, high = min(row["min_version"] for row in rows), max(row["max_version"] for row in rows)
    return Sample(
        kind=kind,
        place=place,
        versions=str(low) if low == high else f"{low}–{high}",
        tokens=sum(sum(row["loss_mask"]) for row in rows),
        finish_reason=rows[0]["finish_reason"],
        messages=tuple(
            (visible(str(message.get("role"))), _shortened(visible(message_text(message))))
            for message in json.loads(rows[0]["messages"])
        ),
    )


def _shortened(text: str) -> str:
    return (
        text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} … ({len(text) - LONGEST_TEXT:,} more characters)"
    )
