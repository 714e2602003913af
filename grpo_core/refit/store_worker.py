"""The engine's side of the transfer through the store. Imported only inside vLLM's worker processes.

A version is fetched, verified and compared with the engine's own checkpoint in the background, while the engine
generates; whatever fails there leaves the engine as it was, and is told to the trainer when it asks. Only `receive`
touches the model, and it loads a file that is known to be right.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from grpo_core.background import call_in_background
from grpo_core.refit import loading
from grpo_core.refit.digest import check_complete, checkpoint_shapes
from grpo_core.refit.shelf import manifest_of, obtain
from grpo_core.refit.snapshot import read_tensors
from grpo_core.trajectory import Stamp
from storage.objects import ObjectStore


@dataclass
class StoreInit(WeightTransferInitInfo):
    """The version to fetch, from where, and the directory of this host that keeps it."""

    url: str
    client: str
    shelf: str
    stamp: str
    timeout_seconds: float
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class StoreUpdate(WeightTransferUpdateInfo):
    """The version to load, which has been fetched."""

    stamp: str


class StoreWorkerEngine(WeightTransferEngine[StoreInit, StoreUpdate]):
    """vLLM's contract for a transfer engine, on files that each host fetches for itself."""

    init_info_cls = StoreInit
    update_info_cls = StoreUpdate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lock = threading.Lock()
        self._stamp = ""
        self._file: Future[Path] | None = None

    def init_transfer_engine(self, init_info: StoreInit) -> None:
        """Begin to fetch a version. Returns at once and never fails: one worker's failure would confuse the replies of
        all the others."""
        with self._lock:
            self._stamp = init_info.stamp
            self._file = call_in_background(lambda: self._obtain(init_info))

    def _obtain(self, info: StoreInit) -> Path:
        store = ObjectStore.open(info.url, info.options, client=info.client, read_only=True)  # type: ignore[arg-type]
        file = obtain(store, Stamp.parse(info.stamp), Path(info.shelf), deadline_seconds=info.timeout_seconds)
        check_complete(manifest_of(file), checkpoint_shapes(loading.checkpoint_directory(self.model_config)))
        return file

    def staged(self) -> dict[str, Any]:
        """How far the fetching is: `stamp`, `done`, and `error`, which is None unless it failed."""
        with self._lock:
            file = self._file
            if file is None or not file.done():
                return {"stamp": self._stamp, "done": False, "error": None}
            error = file.exception()
            said = None if error is None else f"{type(error).__name__}: {error}"
            return {"stamp": self._stamp, "done": error is None, "error": said}

    def start_weight_update(self) -> None:
        """Nothing yet: the model is opened for loading when the file is at hand."""

    def receive_weights(self, update_info: StoreUpdate) -> None:
        with self._lock:
            file = self._file
            if file is None or update_info.stamp != self._stamp or not file.done():
                raise RuntimeError(
                    f"weights {update_info.stamp} were never fetched; the trainer must ask for them first"
                )
        loading.load(self.model, read_tensors(file.result()).items())

    def finish_weight_update(self) -> None:
        loading.finish(self.model, self.model_config)

    def shutdown(self) -> None:
        self._file = None


class StagingExtension:
    """Mixed into vLLM's workers (`--worker-extension-cls`), so that the trainer can ask them how far they are."""

    weight_transfer_engine: Any

    def forebay_staged(self) -> dict[str, Any]:
        """`StoreWorkerEngine.staged` of this worker."""
        return dict(self.weight_transfer_engine.staged())
