"""What a run shows on its page in the Prefect UI: a progress bar and a table of the last steps, each updated in place.

Contract: one row in the server's database per artifact and flow run, however long the run. Errors of the client pass
through; whoever draws decides what a server that is away means.
"""

import json
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate

from flows.progress import Progress

TABLE_ROWS = 50
COLUMNS = (
    "step",
    "reward_mean",
    "loss",
    "grad_norm",
    "lag_mean",
    "lag_max",
    "entropy",
    "completion_tokens_mean",
    "step_seconds",
    "wait_seconds",
)


class Artifacts:
    """The artifacts of one flow run. Use from one thread."""

    def __init__(self, run_id: str, flow_run_id: UUID) -> None:
        # Prefect allows small letters, digits and dashes.
        self._key = "".join(letter if letter.isalnum() else "-" for letter in run_id.lower())
        self._run_id = run_id
        self._flow_run_id = flow_run_id
        self._stored: dict[str, UUID] = {}
        self._step = 0

    def draw(self, client: SyncPrefectClient, progress: Progress) -> None:
        """Bring both up to date. Raise what the client raises."""
        share = 100.0 * progress.step / progress.steps
        self._store(client, "progress", share, f"{progress.phase}, step {progress.step} of {progress.steps}")
        if progress.history and progress.step != self._step:
            rows = metric_table(progress)
            self._store(client, "table", json.dumps(rows), f"The last {len(rows)} steps of {self._run_id}")
            self._step = progress.step

    def _store(self, client: SyncPrefectClient, kind: str, data: float | str, description: str) -> None:
        if kind in self._stored:
            client.update_artifact(self._stored[kind], ArtifactUpdate(data=data, description=description))
            return
        artifact = ArtifactCreate(
            type=kind, key=f"{self._key}-{kind}", data=data, description=description, flow_run_id=self._flow_run_id
        )
        self._stored[kind] = client.create_artifact(artifact).id


def metric_table(progress: Progress) -> list[dict[str, str | None]]:
    """The last steps, newest first, as text."""
    return [
        {name: None if (value := entry.get(name)) is None else f"{value:.4g}" for name in COLUMNS}
        for entry in reversed(progress.history[-TABLE_ROWS:])
    ]
