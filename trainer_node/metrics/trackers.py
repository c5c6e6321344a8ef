"""Experiment trackers: Weights & Biases, MLflow and trackio, each an extra of that name.

Each has one run of the tracker for a run of Stagecoach, which a restarted trainer continues. A tracker deletes nothing:
rows that a restart undid stay there, and are followed by those that took their place. All rows are shown by env steps,
so that a late evaluation is where it belongs.
"""

import os
import posixpath
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stagecoach.shared.base import world
from stagecoach.shared.config.schema.section import leaves
from stagecoach.shared.storage.metric_log import ENV_STEPS, EPISODES, UNIX_TIME
from stagecoach.trainer_node.metrics.writers import MetricWriter, WrittenRun

_PROJECT = "stagecoach"
_MLFLOW_NAME = re.compile(r"[^\w\-. :/]")
_MLFLOW_METRICS, _MLFLOW_PARAMS, _MLFLOW_CHARACTERS = 1000, 100, 500
"""Limits of one MLflow request, and of one value in older servers."""
_RUN_TAG = "stagecoach.run_id"


class WandbWriter(MetricWriter):
    """Weights & Biases. Offline (`wandb sync` uploads it) unless `mode`, `WANDB_MODE` or `WANDB_API_KEY` say otherwise.

    Files are in `metrics/wandb` in the run's folder, or in the temporary folder if the run has no folder.
    """

    PACKAGES = ("wandb",)

    def __init__(
        self, run: WrittenRun, project: str = _PROJECT, entity: str | None = None, group: str | None = None,
        name: str | None = None, tags: Sequence[str] = (), notes: str | None = None, job_type: str | None = None,
        mode: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(run)
        import wandb

        self._wandb = wandb
        default = "online" if os.environ.get("WANDB_API_KEY") else "offline"
        chosen: Any = mode or os.environ.get("WANDB_MODE") or default
        if run.folder is not None:
            run.folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=project, entity=entity, group=group, name=name or run.run_id, tags=tags, notes=notes,
            job_type=job_type, mode=chosen, id=run.run_id, resume="allow",
            dir=run.folder, config=leaves(dict(run.config)),
            settings=wandb.Settings(console="off", silent=True, disable_git=True),
        )  # fmt: skip
        self._run.define_metric(ENV_STEPS)
        self._run.define_metric("*", step_metric=ENV_STEPS)

    def write(self, stream: str, row: Mapping[str, float], step: int, label: str) -> None:
        if stream != EPISODES:
            self._run.log({**row, ENV_STEPS: step})

    def histogram(self, name: str, values: Sequence[float], step: int) -> None:
        if values:
            self._run.log({ENV_STEPS: step, name: self._wandb.Histogram(values)})

    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()  # `finish` alone leaves an offline run to its process, which has not written all yet


class MlflowWriter(MetricWriter):
    """MLflow. In `metrics/mlflow` in the run's folder unless `tracking_uri` or `MLFLOW_TRACKING_URI` name a server."""

    PACKAGES = ("mlflow", "sqlalchemy", "alembic")

    def __init__(
        self, run: WrittenRun, tracking_uri: str | None = None, experiment: str = _PROJECT, name: str | None = None
    ) -> None:
        super().__init__(run)
        from mlflow.entities import Metric, Param, RunStatus
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        if not (uri := tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")):
            folder: Path = run.needed_folder / "mlflow"
            folder.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{(folder / 'mlflow.db').resolve()}"
        self._client = MlflowClient(uri)
        known = self._client.get_experiment_by_name(experiment)
        experiment_id = known.experiment_id if known else self._client.create_experiment(experiment)
        found = self._client.search_runs([experiment_id], f"tags.`{_RUN_TAG}` = '{run.run_id}'")
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status=RunStatus.to_string(RunStatus.RUNNING))
        else:
            made = self._client.create_run(experiment_id, run_name=name or run.run_id, tags={_RUN_TAG: run.run_id})
            self._id = made.info.run_id
            config = leaves(dict(run.config)).items()
            params = [Param(_mlflow_name(field), str(value)[:_MLFLOW_CHARACTERS]) for field, value in config]
            for begin in range(0, len(params), _MLFLOW_PARAMS):
                self._client.log_batch(self._id, params=params[begin : begin + _MLFLOW_PARAMS])
        self._waiting: list[Any] = []

    def write(self, stream: str, row: Mapping[str, float], step: int, label: str) -> None:
        if stream != EPISODES:
            milliseconds = int(row.get(UNIX_TIME, world.unix_time()) * 1000)
            self._waiting += [self._metric(_mlflow_name(name), its, milliseconds, step) for name, its in row.items()]
            if len(self._waiting) >= _MLFLOW_METRICS:
                self.flush()

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for begin in range(0, len(waiting), _MLFLOW_METRICS):
            self._client.log_batch(self._id, metrics=waiting[begin : begin + _MLFLOW_METRICS])

    def close(self) -> None:
        self.flush()
        self._client.set_terminated(self._id)


def _mlflow_name(name: str) -> str:
    """Only of the characters that MLflow takes, and no path that leads elsewhere."""
    taken = _MLFLOW_NAME.sub("_", name)
    return taken if posixpath.normpath(taken) == taken.lstrip("/.") else re.sub(r"[/.]", "_", taken)


class TrackioWriter(MetricWriter):
    """trackio. In its local folder (`TRACKIO_DIR`), which `trackio show` reads, without `space_id` or `server_url`."""

    PACKAGES = ("trackio",)

    def __init__(
        self, run: WrittenRun, project: str = _PROJECT, name: str | None = None, group: str | None = None,
        space_id: str | None = None, server_url: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(run)
        import trackio

        self._histogram = trackio.Histogram
        self._run: Any = trackio.init(
            project=project, name=name or run.run_id, group=group, space_id=space_id, server_url=server_url,
            resume="allow", config=leaves(dict(run.config)), embed=False, auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip

    def write(self, stream: str, row: Mapping[str, float], step: int, label: str) -> None:
        if stream != EPISODES:
            self._run.log(dict(row), step=step)

    def histogram(self, name: str, values: Sequence[float], step: int) -> None:
        if values:
            self._run.log({name: self._histogram(list(values))}, step=step)

    def close(self) -> None:
        self._run.finish()
