"""The light refit: a LoRA adapter per version instead of the whole weights. Runs in trainer rank 0.

    write → give the base (engines that lack it) → load (every engine, the stamp as its name) → canary → unload

Invariants:
- A version is a new adapter with a name and a directory of its own, never a change of one that is loaded: requests in
  flight end under the adapter they began with, so no engine need be paused, and no cached prefix is another version's.
- Where requests are to be drained first (`RefitSettings.pause_mode` is not keep), engines are paused around the
  loading, and resumed whatever came of it: a failed load leaves no weights half-written.
- The name is the stamp, and a request names its adapter: so who asks knows which policy answered, token by token.
- An adapter is complete, finite and on disk before an engine hears of it; an engine that fails is reported as broken.
- Under every adapter lies the base, the frozen weights of version 0, which an engine is given once in an attempt by an
  ordinary refit: so its stamp tells whether it has them, also after it was started again.
- The newest adapters of the attempt stay (a request may just be on its way to them), and so does every one that a
  request names. Those of attempts before it, which are dead, go.

The engines need `--enable-lora`, a rank of at least the adapter's, VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and the
directory under the same path as the trainer. The canary is asked token by token, see `rollout.wire.next_token_request`.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from grpo_core.refit.canary import Canary, check_canary
from grpo_core.refit.control import EngineAddress, EngineControl
from grpo_core.refit.coordinator import RefitFailed, RefitResult, RefitSettings, check_engines, refit_weights
from grpo_core.refit.digest import ManifestError
from grpo_core.refit.phases import Phases
from grpo_core.refit.transfer import Transfer
from grpo_core.trajectory import Stamp

KEPT_ADAPTERS = 2
# Tokens of the canary that an adapter is asked for; each is a request of its own.
CANARY_PLACES = 8
UNFINISHED = ".part"


@dataclass(frozen=True, slots=True)
class Adapter:
    """The change of each adapted linear layer, by its name in the checkpoint without `.weight`: W + alpha/rank · B A.

    `layers` maps the name to (A [rank, inputs], B [outputs, rank]).
    """

    layers: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    rank: int
    alpha: float
    base_model: str


@dataclass(frozen=True, slots=True)
class Base:
    """The frozen weights under the adapters, the engines that lack them, and what moves them there."""

    named_tensors: Iterable[tuple[str, torch.Tensor]]
    engines: Sequence[EngineAddress]
    transfer: Transfer


def engines_without_base(
    engines: Sequence[EngineAddress],
    attempt: int,
    deadline_seconds: float,
    *,
    control: Callable[[EngineAddress], EngineControl] = EngineControl,
) -> tuple[EngineAddress, ...]:
    """Those whose weights were not stamped in this attempt, or that do not say;
    whatever else they carry, it is not known to be the base."""
    stamps: dict[str, str] = {}
    phases = Phases({engine.name: control(engine) for engine in engines})
    phases.run(
        "connect",
        deadline_seconds,
        lambda engine: stamps.update({engine.name: engine.weight_stamp(deadline_seconds)}),
    )
    carried = {name: _stamp_of(stamp) for name, stamp in stamps.items()}
    return tuple(
        engine for engine in engines if (stamp := carried.get(engine.name)) is None or stamp.attempt != attempt
    )


def refit_adapter(
    adapter: Adapter,
    engines: Sequence[EngineAddress],
    stamp: Stamp,
    directory: Path,
    settings: RefitSettings,
    *,
    canary: Canary | None,
    base: Base | None = None,
    fence: Callable[[], None] = lambda: None,
    control: Callable[[EngineAddress], EngineControl] = EngineControl,
) -> RefitResult:
    """Give `engines` the adapter called `stamp`, kept below `directory`, and first the `base` to those that lack it.
    Only these are paused, unless requests are to be drained. `fence` raises Fenced when a newer attempt owns the run,
    and with it the engines.

    Raises ManifestError before any engine hears of it when the adapter is not finite or not of one rank, and
    RefitFailed when no engine is left.
    """
    if not engines:
        raise ValueError(f"the refit to {stamp} has no engine; give at least one")
    began = time.monotonic()
    path, new = directory / str(stamp), not (directory / str(stamp)).exists()
    write_adapter(adapter, path)
    seconds = {"prepare": time.monotonic() - began}
    given = _give(base, stamp, settings, fence, control)
    lost = {engine.name for engine in given.broken}
    phases = Phases({engine.name: control(engine) for engine in engines if engine.name not in lost}, fence)
    differences: dict[str, float] = {}
    _load_and_check(phases, str(stamp), path, settings, canary, differences)
    kept: set[str] = set()
    phases.run(
        "finish",
        3 * settings.finish_seconds,
        lambda engine: kept.update(_unload(engine, stamp.attempt, settings.finish_seconds)),
    )
    broken = (*given.broken, *phases.broken)
    if new and not broken:
        # Later calls for the same version are for engines that joined late,
        # and know nothing of what others have loaded.
        _delete_directories(directory, kept, stamp.attempt)
    if not phases.alive:
        raise RefitFailed(stamp, broken)
    received = given.bytes + sum(file.stat().st_size for file in path.iterdir())
    for part in (given.seconds, phases.seconds):
        seconds |= {phase: seconds.get(phase, 0.0) + value for phase, value in part.items()}
    return RefitResult(stamp, tuple(phases.alive), broken, seconds, differences, bytes=received)


def _give(
    base: Base | None,
    stamp: Stamp,
    settings: RefitSettings,
    fence: Callable[[], None],
    control: Callable[[EngineAddress], EngineControl],
) -> RefitResult:
    """The refit that brings the base to engines without it. No canary: the adapter's tells about both."""
    if base is None or not base.engines:
        return RefitResult(stamp, (), (), {}, {})
    try:
        return refit_weights(
            base.named_tensors,
            base.engines,
            stamp,
            base.transfer,
            settings,
            canary=None,
            fence=fence,
            control=control,
        )
    except RefitFailed as failure:
        return RefitResult(stamp, (), failure.broken, {}, {})


def _load_and_check(
    phases: Phases,
    name: str,
    path: Path,
    settings: RefitSettings,
    canary: Canary | None,
    differences: dict[str, float],
) -> None:
    """Every engine has the adapter `name`, and computes with it what the trainer computes, or is broken."""

    def load(engine: EngineControl) -> None:
        if name not in engine.adapters(settings.start_seconds):
            engine.load_adapter(name, str(path), settings.transfer_seconds)

    with _drained(phases, settings):
        phases.run("transfer", settings.start_seconds + settings.transfer_seconds, load)
    if canary is None:
        return
    places, tokens = canary.thinned(CANARY_PLACES), list(canary.token_ids)

    def check(engine: EngineControl) -> float:
        """The largest difference to the trainer, in nats."""
        salt = f"canary {uuid.uuid4()}"

        def score(place: int) -> float:
            return engine.score_last(tokens[: place + 2], salt, settings.canary_seconds, model=name)

        # All at once: a busy engine makes each of them wait.
        with ThreadPoolExecutor(len(places), thread_name_prefix="canary") as threads:
            return check_canary(engine.name, canary, list(threads.map(score, places)), places)

    check_engines(phases, check, settings, differences)


@contextmanager
def _drained(phases: Phases, settings: RefitSettings) -> Iterator[None]:
    """While this lasts no engine samples, if requests are to be drained before a version changes."""
    if settings.pause_mode == "keep":
        yield
        return
    paused = list(phases.alive)
    try:
        # No cached prefix is another adapter's.
        phases.run(
            "pause",
            settings.pause_seconds,
            lambda engine: engine.pause(settings.pause_mode, False, settings.pause_seconds),
        )
        yield
    finally:
        phases.run(
            "resume", settings.resume_seconds, lambda engine: engine.resume(settings.resume_seconds), names=paused
        )


def write_adapter(adapter: Adapter, directory: Path) -> Path:
    """Write an adapter as PEFT does, whole or not at all; return its directory, which may be there already."""
    if directory.exists():
        return directory
    tensors: dict[str, torch.Tensor] = {}
    for name, (a, b) in adapter.layers.items():
        if a.shape[0] != adapter.rank or b.shape[1] != adapter.rank:
            raise ManifestError(
                f"adapter of {name} has shapes {tuple(a.shape)} and {tuple(b.shape)}, not of rank {adapter.rank}"
            )
        for letter, tensor in (("A", a), ("B", b)):
            if not bool(torch.isfinite(tensor).all()):
                raise ManifestError(
                    f"adapter of {name} holds NaN or infinity; the policy has diverged and is not refitted"
                )
            tensors[f"base_model.model.{name}.lora_{letter}.weight"] = tensor.detach().cpu().contiguous()
    made = directory.with_name(directory.name + UNFINISHED)
    made.mkdir(parents=True, exist_ok=True)
    save_file(tensors, made / "adapter_model.safetensors")
    (made / "adapter_config.json").write_text(json.dumps(_peft_config(adapter)), encoding="utf-8")
    os.replace(made, directory)
    return directory


def _peft_config(adapter: Adapter) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base_model,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in adapter.layers}),
    }


def _unload(engine: EngineControl, attempt: int, deadline_seconds: float) -> set[str]:
    """Unload what nobody names any more; what stays."""
    loaded = set(engine.adapters(deadline_seconds))
    in_use = engine.adapters_in_use(deadline_seconds)
    gone = unloadable(loaded, in_use, attempt)
    for name in gone:
        engine.unload_adapter(name, deadline_seconds)
    return loaded - set(gone)


def _delete_directories(directory: Path, kept: Collection[str], attempt: int) -> None:
    """Delete the adapters that no engine has loaded (engines read a loaded one again when they need its room), and what
    a killed trainer left half-written."""
    names = [path.name for path in directory.iterdir()]
    for name in [*unloadable(names, kept, attempt), *(name for name in names if name.endswith(UNFINISHED))]:
        shutil.rmtree(directory / name)


def unloadable(loaded: Collection[str], in_use: Collection[str], attempt: int) -> list[str]:
    """Which adapters to unload in an attempt, oldest first: ours that no request names, all of earlier attempts and all
    but the newest of this one. Pure."""
    # Other names are adapters of somebody else.
    ours = sorted(stamp for name in loaded if (stamp := _stamp_of(name)) is not None)
    dead = [stamp for stamp in ours if stamp.attempt < attempt]
    old = [stamp for stamp in ours if stamp.attempt == attempt][:-KEPT_ADAPTERS]
    return [str(stamp) for stamp in (*dead, *old) if str(stamp) not in in_use]


def _stamp_of(name: str) -> Stamp | None:
    """The stamp that an adapter is called after, or that an engine says it carries; None for what is no stamp."""
    try:
        return Stamp.parse(name)
    except ValueError:
        return None
