"""The light refit: a LoRA adapter per version instead of the whole weights. Runs in trainer rank 0.

    write → load (every engine, under the stamp as its name) → canary → unload what nobody names any more

Invariants:
- A version is a new adapter with a name and a directory of its own, never a change of one that is loaded: requests in
  flight end under the adapter they began with, so no engine is paused, and no cached prefix is another version's.
- The name is the stamp, and a request names its adapter: so who asks knows which policy answered, token by token.
- An adapter is complete, finite and on disk before an engine hears of it; an engine that fails is reported as broken.
- The newest adapters stay (a request may just be on its way to them), and so does every one that a request names.

The engines need `--enable-lora`, a rank of at least the adapter's, VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and the directory
under the same path as the trainer. On CPUs vLLM 0.32 dies of a canary that shares an engine step with other requests
once adapters are enabled (its LoRA kernel takes the scored tokens for requests): refit such engines while they are idle.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from grpo_core.refit.canary import Canary
from grpo_core.refit.control import EngineAddress, EngineControl
from grpo_core.refit.coordinator import RefitFailed, RefitResult, RefitSettings, check_engines
from grpo_core.refit.digest import ManifestError
from grpo_core.refit.phases import Phases
from grpo_core.trajectory import Stamp

KEPT_ADAPTERS = 2


@dataclass(frozen=True, slots=True)
class Adapter:
    """The change of each adapted linear layer, by its name in the checkpoint without `.weight`: W + alpha/rank · B A.

    `layers` maps the name to (A [rank, inputs], B [outputs, rank]).
    """

    layers: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    rank: int
    alpha: float
    base_model: str


def refit_adapter(
    adapter: Adapter,
    engines: Sequence[EngineAddress],
    stamp: Stamp,
    directory: Path,
    settings: RefitSettings,
    *,
    canary: Canary | None,
    control: Callable[[EngineAddress], EngineControl] = EngineControl,
) -> RefitResult:
    """Give `engines` the adapter called `stamp`, kept below `directory`; they go on generating meanwhile.

    Raises ManifestError before any engine hears of it when the adapter is not finite or not of one rank, and
    RefitFailed when no engine is left.
    """
    if not engines:
        raise ValueError(f"the refit to {stamp} has no engine; give at least one")
    began = time.monotonic()
    path = write_adapter(adapter, directory / str(stamp))
    phases = Phases({engine.name: control(engine) for engine in engines})
    phases.seconds["prepare"] = time.monotonic() - began
    name, differences = str(stamp), dict[str, float]()

    def load(engine: EngineControl) -> None:
        if name not in engine.adapters(settings.start_seconds):
            engine.load_adapter(name, str(path), settings.transfer_seconds)

    phases.run("transfer", settings.start_seconds + settings.transfer_seconds, load)
    if canary is not None:
        check_engines(phases, canary, settings, differences, model=name)
    kept: set[str] = set()
    phases.run(
        "finish", 3 * settings.finish_seconds, lambda engine: kept.update(_unload(engine, settings.finish_seconds))
    )
    if not phases.broken:
        _delete_directories(directory, kept)
    if not phases.alive:
        raise RefitFailed(stamp, phases.broken)
    received = sum(file.stat().st_size for file in path.iterdir())
    return RefitResult(stamp, tuple(phases.alive), tuple(phases.broken), phases.seconds, differences, bytes=received)


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
    made = directory.with_name(f"{directory.name}.part")
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


def _unload(engine: EngineControl, deadline_seconds: float) -> set[str]:
    """Unload what nobody names any more; what stays."""
    loaded = set(engine.adapters(deadline_seconds))
    gone = unloadable(loaded, engine.adapters_in_use(deadline_seconds))
    for name in gone:
        engine.unload_adapter(name, deadline_seconds)
    return loaded - set(gone)


def _delete_directories(directory: Path, kept: Collection[str]) -> None:
    """Delete the adapters that no engine has loaded; engines read a loaded one again when they need its room."""
    names = [path.name for path in directory.iterdir()]
    for name in unloadable(names, kept):
        shutil.rmtree(directory / name)


def unloadable(loaded: Collection[str], in_use: Collection[str]) -> list[str]:
    """Which adapters to unload, oldest first: ours, neither among the newest nor named by a request. Pure."""
    ours: list[Stamp] = []
    for name in loaded:
        try:
            ours.append(Stamp.parse(name))
        except ValueError:
            continue  # an adapter of somebody else
    return [str(stamp) for stamp in sorted(ours)[:-KEPT_ADAPTERS] if str(stamp) not in in_use]
