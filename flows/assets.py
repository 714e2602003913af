"""Assets: what a run has made, from what and with which code. Our own records, mirrored as Prefect's asset events.

    prompts ─▶ policy (version 0) ─▶ checkpoints (attempt, step) ─▶ evaluations (attempt, version)

Contract: there is one record of an asset's partition, put if absent and never changed, with its data version (a digest
of the content), the version of this code, and the data versions of what it was made from. The records are brought up to
date from what the store holds, so they may be late but miss nothing that is still there. The event is told only inside
a flow run, and may be lost; the record is the truth.
"""

import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from flows.run import Run
from grpo_core.config import TinyModel
from storage import layout
from storage.attempts import read_attempt
from storage.checkpoints import Manifest, committed, read_manifest
from storage.digests import digest_directory, fields_of
from storage.errors import DamagedCheckpoint, ObjectMissing
from storage.objects import ObjectStore
from storage.records import encode_record, read_record

PROMPTS, POLICY, CHECKPOINTS, EVALUATIONS = "prompts", "policy", "checkpoints", "evaluations"
# The one partition of what a run has only once.
WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Materialisation:
    """One partition of one asset. `inputs` maps each `asset@partition` that it was made from to its data version."""

    asset: str
    partition: str
    data_version: str
    code_version: str
    inputs: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def as_input(self) -> dict[str, str]:
        """What something made from this has among its inputs."""
        return {f"{self.asset}@{self.partition}": self.data_version}


def materialise(store: ObjectStore, made: Materialisation) -> bool:
    """Record it and tell Prefect, unless it is recorded already. Whether this call recorded it."""
    key = layout.asset(made.asset, made.partition)
    if store.exists(key) or not store.commit(key, encode_record(asdict(made))):
        return False
    _tell_prefect(store, made)
    return True


def read_materialisation(store: ObjectStore, asset: str, partition: str) -> Materialisation:
    """Raise ObjectMissing or DamagedRecord."""
    return Materialisation(**read_record(store, layout.asset(asset, partition)))


def record_origin(run: Run, initial: Path) -> Materialisation:
    """Record prompts and policy, once for a run; `initial` holds the weights of version 0. The policy's record.

    The first call reads every byte of the weights.
    """
    store, model = run.store, run.config.model
    rows = {"train": len(run.splits.train), "held_out": len(run.splits.held_out)}
    prompts = Materialisation(PROMPTS, WHOLE, run.splits.digest(), code_version(), metadata=rows)
    materialise(store, prompts)
    if not store.exists(layout.asset(POLICY, WHOLE)):
        warm_start = model.warm_start.model_dump(mode="json") if model.warm_start is not None else None
        files = digest_directory(initial)
        metadata = {
            "source": model.source.kind,
            "warm_start": None if warm_start is None else _digest(warm_start),
            "bytes": sum(file.bytes for file in files.values()),
        }
        # A tiny model's tokenizer is trained on the prompts, and so is every warm start.
        made_here = warm_start is not None or isinstance(model.source, TinyModel)
        inputs = prompts.as_input if made_here else {}
        materialise(store, Materialisation(POLICY, WHOLE, _digest(fields_of(files)), code_version(), inputs, metadata))
    return read_materialisation(store, POLICY, WHOLE)


def record_progress(run: Run, policy: Materialisation) -> list[Materialisation]:
    """Record the checkpoints and evaluations that the store has and no record names yet; those recorded now."""
    store = run.store
    prompts = read_materialisation(store, PROMPTS, WHOLE)
    recorded = []
    for name in committed(store):
        if store.exists(layout.asset(CHECKPOINTS, partition(name.attempt, name.step))):
            continue
        try:
            manifest = read_manifest(store, name.attempt, name.step)
        except (ObjectMissing, DamagedCheckpoint):
            continue  # retention deleted it meanwhile, or whoever resumes reports it; neither is an asset
        made = _checkpoint(manifest, {**prompts.as_input, **_resumed_from(store, name.attempt, policy)})
        recorded += [made] if materialise(store, made) else []
    for key in store.list(layout.evaluations_prefix(), recursive=True):
        evaluation = layout.parse_evaluation(key)
        if evaluation is None or evaluation.name is not None:
            continue
        place = partition(evaluation.attempt, evaluation.version)
        if store.exists(layout.asset(EVALUATIONS, place)):
            continue
        inputs = {**prompts.as_input, **_evaluated(run, evaluation, policy)}
        made = Materialisation(EVALUATIONS, place, store.digest(key)[1], code_version(), inputs, {"key": key})
        recorded += [made] if materialise(store, made) else []
    return recorded


def partition(attempt: int, number: int) -> str:
    """The partition of an asset that has one per attempt and step, or per attempt and version."""
    return f"{attempt:06d}-{number:09d}"


@cache
def code_version() -> str:
    """The version of the installed package; `source` where it runs without being installed."""
    try:
        return importlib.metadata.version("forebay")
    except importlib.metadata.PackageNotFoundError:
        return "source"


def _checkpoint(manifest: Manifest, inputs: Mapping[str, str]) -> Materialisation:
    place = partition(manifest.attempt, manifest.step)
    metadata = {"version": manifest.version, "created_at": manifest.created_at, "metrics": dict(manifest.metrics)}
    data_version = _digest(fields_of(manifest.files))
    return Materialisation(CHECKPOINTS, place, data_version, code_version(), inputs, metadata)


def _resumed_from(store: ObjectStore, attempt: int, policy: Materialisation) -> dict[str, str]:
    """What the weights of an attempt began from: a checkpoint, or version 0."""
    parent = read_attempt(store, attempt).parent
    if parent is None:
        return policy.as_input
    return _checkpoint_input(store, *parent)


def _evaluated(run: Run, evaluation: layout.EvaluationName, policy: Materialisation) -> dict[str, str]:
    """The weights of an evaluated version: version 0, or the checkpoint of its step if that was kept."""
    if evaluation.version == 0:
        return policy.as_input
    return _checkpoint_input(run.store, evaluation.attempt, evaluation.version * run.config.refit.every_steps)


def _checkpoint_input(store: ObjectStore, attempt: int, step: int) -> dict[str, str]:
    """A checkpoint as an input; nothing when it is gone and was never recorded."""
    try:
        return read_materialisation(store, CHECKPOINTS, partition(attempt, step)).as_input
    except ObjectMissing:
        return {}


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _tell_prefect(store: ObjectStore, made: Materialisation) -> None:
    """Inside a flow run, queue the event that Prefect itself sends for an asset; without one, Prefect is not loaded."""
    prefect = sys.modules.get("prefect.context")
    if prefect is None or prefect.FlowRunContext.get() is None:
        return
    from prefect.events import emit_event

    upstream = [name.partition("@")[0] for name in made.inputs]
    emit_event(
        "prefect.asset.materialization.succeeded",
        resource={
            "prefect.resource.id": asset_key(store, made.asset),
            "prefect.resource.name": made.asset,
            "forebay.partition": made.partition,
            "forebay.data-version": made.data_version,
            "forebay.code-version": made.code_version,
        },
        related=[
            {"prefect.resource.id": asset_key(store, asset), "prefect.resource.role": "asset"} for asset in upstream
        ],
        payload=asdict(made),
    )


def asset_key(store: ObjectStore, asset: str) -> str:
    """The URI by which Prefect knows an asset of this run."""
    root = store.url if "://" in store.url else Path(store.url).absolute().as_uri()
    return f"{root.rstrip('/')}/{asset}"
