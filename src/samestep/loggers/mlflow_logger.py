"""MLflow: https://mlflow.org. `args` has `tracking_uri` and `tags`.

Without a URI there, MLFLOW_TRACKING_URI says which server; without that, a database in the run's folder, which
mlflow-skinny can't open.
"""

import time
from collections.abc import Mapping
from typing import Any

from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]
from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

from samestep.job import Log
from samestep.loggers.base import LoggedRun, Logger

_LONGEST_VALUE = 500  # characters of a parameter, beyond which some stores refuse it


class MLflow(Logger):
    """One run of MLflow, by a client of its own: nothing of it is active in the process beside."""

    def __init__(self, settings: Log, run: LoggedRun) -> None:
        local = f"sqlite:///{(run.folder / 'mlflow.db').absolute()}"
        uri = settings.args.get("tracking_uri") or run.environ.get("MLFLOW_TRACKING_URI", local)
        self._client = MlflowClient(tracking_uri=uri)
        self._sent: Any = None  # the last numbers, which a thread of MLflow sends
        if run.identity is not None:
            self.identity = self._client.get_run(run.identity).info.run_id
            return
        name = settings.project or "samestep"
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        started = self._client.create_run(
            number, run_name=settings.name or run.name, tags=dict(settings.args.get("tags", {}))
        )
        self.identity = started.info.run_id
        for key, value in _flat(run.config):
            self._client.log_param(self.identity, key, str(value)[:_LONGEST_VALUE])

    @classmethod
    def check(cls, settings: Log, environ: Mapping[str, str]) -> None:
        """Nothing can be missing."""

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        points = [Metric(name, value, now, step) for name, value in values.items()]
        self._sent = self._client.log_batch(self.identity, metrics=points, synchronous=False)

    def text(self, step: int, name: str, text: str) -> None:
        self._client.log_text(self.identity, text, f"{name}/step-{step}.txt")

    def close(self, *, failed: bool) -> None:
        if self._sent is not None:
            self._sent.wait()  # they are sent in order
        self._client.set_terminated(self.identity, "FAILED" if failed else "FINISHED")


def _flat(section: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Keys such as recipe.optimizer.lr with their values."""
    pairs = list[tuple[str, Any]]()
    for key, value in section.items():
        pairs += _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return pairs
