"""Sinks that are other people's packages, imported when they are opened.

Contract: a run is filed under its id, and a run that is continued goes on in the same place. Steps are those of the
ledger; a step that a later attempt trains again is written again. No point is lost because one of a later step came
before it: an evaluation belongs to the step whose weights it judges, and training does not wait for it.
"""

import re
from importlib import import_module
from pathlib import Path

from storage.metrics import Point

# What a name may not hold for MLflow.
UNNAMEABLE = re.compile(r"[^/\w.\- :]")


class TensorBoardFiles:
    """Event files in a directory. A lower step than the newest takes the place of those of its own metric alone."""

    def __init__(self, directory: Path) -> None:
        self._writer = import_module("tensorboard.summary").Writer(str(directory))

    def write(self, point: Point) -> None:
        for name, value in point.metrics.items():
            self._writer.add_scalar(name, value, point.step, wall_time=point.at)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbRun:
    """A run of Weights & Biases. Its own step only counts calls, for it drops whatever comes with a lower step than the
    newest: an evaluation that ends after later steps, or steps that a later attempt trains again. Ours is a metric,
    which it is told to draw all others over."""

    def __init__(self, project: str, run_id: str) -> None:
        self._run = import_module("wandb").init(project=project, name=run_id, id=run_id, resume="allow")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, point: Point) -> None:
        self._run.log({**point.metrics, **_place(point), "step": point.step})

    def close(self) -> None:
        self._run.finish()


class TrackioRun:
    """A run of Trackio, which keeps every step in whatever order they come."""

    def __init__(self, project: str, run_id: str) -> None:
        self._run = import_module("trackio").init(project=project, name=run_id, resume="allow")

    def write(self, point: Point) -> None:
        self._run.log({**point.metrics, **_place(point)}, step=point.step)

    def close(self) -> None:
        self._run.finish()


class MlflowRun:
    """A run of MLflow, which keeps every step in whatever order they come."""

    def __init__(self, experiment: str, run_id: str) -> None:
        self._mlflow = import_module("mlflow")
        self._mlflow.set_experiment(experiment)
        known = self._mlflow.search_runs(
            experiment_names=[experiment], filter_string=f"attributes.run_name = '{run_id}'", output_format="list"
        )
        self._mlflow.start_run(run_id=known[0].info.run_id if known else None, run_name=None if known else run_id)

    def write(self, point: Point) -> None:
        metrics = {UNNAMEABLE.sub("_", name.replace("@", "_at_")): value for name, value in point.metrics.items()}
        self._mlflow.log_metrics(metrics, step=point.step)

    def close(self) -> None:
        self._mlflow.end_run()


def _place(point: Point) -> dict[str, int]:
    return {"attempt": point.attempt, "version": point.version}
