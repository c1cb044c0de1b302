"""What engines other than the native one are held against: points by a small net, and a net with branches."""

from typing import Any

from small_tasks import Points
from test_unused import Branches

import samestep


class Branched(Branches):
    """A net of which a batch may use a part alone."""

    def scores(self, output: Any, batch: samestep.Batch) -> Any:
        return output[0], batch.targets


def recipe(task: samestep.Task | None = None, **values: Any) -> samestep.Recipe:
    settings = {"batch": 33, "epochs": 1, "clip": 0.5, "optimizer": samestep.AdamW(lr=1e-2)}
    return samestep.Recipe(task=task or Points(), **{**settings, **values})
