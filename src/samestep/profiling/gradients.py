"""The backward of a step, as a clock is told of it."""

from collections.abc import Callable

from torch import Tensor
from torch.autograd import Variable

from samestep.profiling.clock import StepClock


def told_of_gradients(clock: StepClock, backward: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """A backward that is a phase of its own, in which the clock is told when every gradient is there.

    Autograd then runs the callbacks that were queued in this backward, in their order. The clock's is queued by the
    first node, so it comes before those that wait for messages.
    """

    def tell_at_end(_: Tensor) -> None:
        Variable._execution_engine.queue_callback(clock.gradients_there)

    def run(loss: Tensor) -> None:
        with clock.of("backward"):
            hook = loss.register_hook(tell_at_end) if loss.requires_grad else None
            backward(loss)
            if hook is not None:
                hook.remove()

    return run
