"""Run: one forward of a stage, which runs its own calls of units and replaces the outputs of the others."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from samestep.data.nests import map_tensors, tensors_in
from samestep.parallel.exact.forward_context import ForwardContext
from samestep.parallel.pipeline.blanks import BlankOutput
from samestep.parallel.pipeline.partition import PartitionPlan
from samestep.parallel.pipeline.units import UnitOutput


class StageDone(BaseException):
    """Raised to end the model's forward after a stage's last call. A BaseException, as models may catch Exception."""


class StageRun:
    """One forward of one stage.

    Stand-ins of units call it: a call of this stage runs the unit, a call of an earlier stage returns received
    tensors and blanks for the rest, and after the stage's last call the forward ends.

    Calls are numbered over the whole forward, as in the trace; a call belongs to the stage whose interval contains
    its number (`PartitionPlan.ends`). A forward that calls units in another order than the trace raises an error.
    """

    def __init__(
        self, plan: PartitionPlan, stage: int, received: Mapping[UnitOutput, Tensor], forward_context: ForwardContext
    ) -> None:
        self._plan = plan
        self._stage = stage
        self._received = received
        self._forward_context = forward_context
        self._counts: dict[str, int] = {}
        self._inside = False  # whether a unit of this stage runs; other units that it calls are a part of it
        self._wanted = plan.computed_in(stage)
        self.captured: dict[UnitOutput, Tensor] = {}

    def call(
        self,
        unit: str,
        module: nn.Module | None,
        blanks: BlankOutput | None,
        hooks: Callable[..., None],
        arguments: Any,
        keywords: Any,
    ) -> Any:
        """Handle a call of a unit. `module`: the unit, if this rank holds it; `hooks`: the model's own of it."""
        # A unit may call another (a shared embedding used as output layer), which runs as a part of it.
        if self._inside and module is not None:
            return module(*arguments, **keywords)
        number = self._next(unit)
        stage = self._plan.stage_of_call(number)
        if stage < self._stage:
            assert blanks is not None
            output = self._from_before(number, blanks(arguments, keywords))
            hooks(arguments, keywords, output)
            return output
        if stage > self._stage:
            raise RuntimeError(
                f"{unit} of pipeline stage {stage} is called before stage {self._stage} is done: the forward calls "
                "its layers in another order, or fewer of them, than with the samples that it was followed with; use "
                "a layout without pp"
            )
        assert module is not None
        self._inside = True
        try:
            output = module(*arguments, **keywords)
        finally:
            self._inside = False
        self._capture(number, output)
        if number == self._plan.ends[self._stage] - 1 and self._stage < self._plan.stages - 1:
            # What the forward does from here on belongs to the next stage; only an exception leaves it here.
            raise StageDone
        return output

    def _next(self, unit: str) -> int:
        """The number of a unit's call among those of all units."""
        numbers = self._plan.calls_of(unit)
        if not numbers:
            raise RuntimeError(
                f"{unit} is called, and was not with the samples that the forward was followed with, so no pipeline "
                "stage has it; use a layout without pp"
            )
        count = self._counts.get(unit, 0)
        self._counts[unit] = count + 1
        if count < len(numbers):
            return numbers[count]
        if len({self._plan.stage_of_call(number) for number in numbers}) == 1 and not self._plan.is_handed_on(unit):
            return numbers[-1]
        raise RuntimeError(
            f"{unit} is called more often than with the samples that the forward was followed with ({len(numbers)} "
            "times), so no pipeline stage knows which call is whose; use a layout without pp"
        )

    def _from_before(self, number: int, output: Any) -> Any:
        """The output of an earlier stage's call: received tensors, and blanks for the others."""
        # The earlier stage's random draws are counted, so that later draws have the same numbers as in one process.
        for name, draws in self._plan.draws.get(number, {}).items():
            self._forward_context.skip(name, draws)
        places = iter(range(len(tensors_in(output))))
        return map_tensors(partial(self._filled, number, places), output)

    def _filled(self, number: int, places: Iterator[int], tensor: Tensor) -> Tensor:
        output_here = self._plan.given(number, next(places))
        if output_here is None or output_here not in self._received:
            return tensor
        received = self._received[output_here]
        return received.clone() if output_here.changed else received  # autograd forbids writes to a leaf

    def _capture(self, number: int, output: Any) -> None:
        """Keep the outputs of a call that later stages use."""
        outputs = self._wanted.get(number, ())
        tensors = tensors_in(output) if outputs else []
        for unit_output in outputs:
            if unit_output.number >= len(tensors):
                raise RuntimeError(
                    f"{self._plan.calls[number].unit} gives {len(tensors)} tensors, and later pipeline stages take "
                    f"one more: it gave more with the samples that the forward was followed with"
                )
            tensor = tensors[unit_output.number]
            self.captured[unit_output] = tensor.clone() if unit_output.changed else tensor

    def handed_on(self) -> list[Tensor]:
        """The tensors that this stage has computed and passes on, in the plan's order."""
        own = [unit_output for some in self._wanted.values() for unit_output in some]
        return [self.captured[unit_output] for unit_output in sorted(own, key=UnitOutput.place)]

    def never_ended(self) -> RuntimeError:
        """The error for a forward that ended before the stage's last call."""
        last = self._plan.calls[self._plan.ends[self._stage] - 1].unit
        return RuntimeError(
            f"the forward does not call {last}, the last of pipeline stage {self._stage}, as it did with the samples "
            "that it was followed with (layer drop and the like decide by chance what is called); use "
            "a layout without pp"
        )
