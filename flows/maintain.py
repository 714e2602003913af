"""Upkeep of runs as Prefect flows: what a schedule repeats while runs come and go.

A collection needs nothing of the run's own flow and may run beside it, on any machine that reaches the store.
"""

import time
from typing import Any

from prefect import flow, get_run_logger

from flows.collection import collect_garbage
from grpo_core.config import StorageConfig
from storage import layout
from storage.objects import ObjectStore


@flow(name="gc", flow_run_name="gc-{run_id}")
def gc(run_id: str, storage: StorageConfig | None = None, dry_run: bool = False) -> dict[str, Any]:
    """Delete what the retention of one run no longer needs; the same as `forebay gc`.

    Args:
        run_id: The run's name.
        storage: Where runs are kept, as in the run's recipe.
        dry_run: Only say what would go.
    """
    settings = storage or StorageConfig()
    logger = get_run_logger()
    root = layout.run_root(settings.root, run_id)
    store = ObjectStore.open(root, settings.options, client=settings.client, read_only=dry_run)
    found = collect_garbage(store, now=time.time(), dry_run=dry_run)
    for name in found.unreadable:
        logger.warning(f"the manifest of checkpoint {name.attempt}/{name.step} cannot be read; restore or remove it")
    logger.info(found.line())
    return found.as_json()
