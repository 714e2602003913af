"""Sinks that are other people's packages, imported when they are opened.

Contract: a run is filed under its id, and a run that is continued goes on in the same place. Steps are those of the
ledger; a step that a later attempt trains again is written again.
"""

from importlib import import_module
from pathlib import Path

from storage.metrics import Point


class TensorBoardFiles:
    """Event files in a directory."""

    def __init__(self, directory: Path) -> None:
        self._writer = import_module("tensorboard.summary").Writer(str(directory))

    def write(self, point: Point) -> None:
        for name, value in point.metrics.items():
            self._writer.add_scalar(name, value, point.step, wall_time=point.at)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class TrackedRun:
    """A run of `wandb`, or of `trackio`, which has the same interface."""

    def __init__(self, package: str, project: str, run_id: str) -> None:
        tracker = import_module(package)
        identity = {"id": run_id} if package == "wandb" else {}
        self._run = tracker.init(project=project, name=run_id, resume="allow", **identity)

    def write(self, point: Point) -> None:
        self._run.log({**point.metrics, "attempt": point.attempt, "version": point.version}, step=point.step)

    def close(self) -> None:
        self._run.finish()


class MlflowRun:
    """A run of MLflow."""

    def __init__(self, experiment: str, run_id: str) -> None:
        self._mlflow = import_module("mlflow")
        self._mlflow.set_experiment(experiment)
        known = self._mlflow.search_runs(
            experiment_names=[experiment], filter_string=f"attributes.run_name = '{run_id}'", output_format="list"
        )
        self._mlflow.start_run(run_id=known[0].info.run_id if known else None, run_name=None if known else run_id)

    def write(self, point: Point) -> None:
        # Its names may not hold an @.
        metrics = {name.replace("@", "_at_"): value for name, value in point.metrics.items()}
        self._mlflow.log_metrics(metrics, step=point.step)

    def close(self) -> None:
        self._mlflow.end_run()
