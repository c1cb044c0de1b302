"""An engine and a communication method as the package of a third party has them, for tests/test_plugins.py."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from samestep.comm.compression.base import Method
from samestep.engines.native.engine import Native

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "toy-samestep"
version = "1.0"

[tool.hatch.build.targets.wheel]
include = ["toy_engine.py"]

[project.entry-points."samestep.engines"]
toy = "toy_engine:Toy"
other-name = "toy_engine:Toy"
no-engine = "toy_engine:WholeOptions"
broken = "toy_engine:Missing"

[project.entry-points."samestep.communication"]
whole = "toy_engine:Whole"
without-options = "toy_engine:Toy"
"""


class Toy(Native):
    """The native step under another name."""

    name = "toy"


@dataclass(frozen=True, kw_only=True)
class WholeOptions:
    kind: Literal["whole"] = "whole"
    every: int = 1


class Whole(Method):
    """Averages whole gradients, so that its step is the one that DistributedDataParallel takes."""

    options_type: ClassVar[type] = WholeOptions

    def exchange(self) -> bool:
        gradients = [p.grad for p in self.replica.parameters.values() if p.grad is not None]
        self.replica.wire.mean(gradients)
        return True

    def update(self, weight: float) -> None:
        self.replica.optimizer.step()
