"""A task whose steps take a while, so that faults find the job at work."""

import time
from typing import Any

from small_tasks import Points
from torch import Tensor


class SlowPoints(Points):
    def loss(self, output: Tensor, batch: Any) -> tuple[Tensor, Tensor | int]:
        time.sleep(0.02)
        return super().loss(output, batch)
