"""Holdings: the tensors that a rank keeps between steps, by kind and by location.

They are counted after a step, before gradients are cleared. What a step needs in addition (activations, messages,
gathered parameters) is measured by `training.usage`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.layout import Layout
from samestep.parallel.offload.memory import MappedFile
from samestep.parallel.optimizer.offloaded import OffloadedOptimizer
from samestep.parallel.sharding import local
from samestep.parallel.state_shards import innermost


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """The tensors that a rank holds after a step, in disjoint groups; of sharded tensors the local shards."""

    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]
    optimizer_state: Sequence[Tensor]
    host: Sequence[Tensor] = ()  # tensors of any kind that are offloaded to host memory
    disk: Sequence[Tensor] = ()  # tensors that are offloaded to files


def holdings(
    model: nn.Module,
    optimizer: Optimizer,
    layout: Layout,
    *,
    host_activations: Iterable[Tensor] = (),
    file: MappedFile | None = None,
    average: Iterable[Tensor] = (),
) -> Holdings:
    """Collect the tensors of a spread model and its optimizer; `file`: holds parameters that are offloaded to disk.

    `average`: a moving average of the weights, which counts as optimizer state.
    """
    parameters = [local(parameter.detach()) for parameter in model.parameters()]
    gradients = [local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    host, disk = list(host_activations), list[Tensor]()
    state = list[Tensor](average)
    for inner in innermost(optimizer):
        if isinstance(inner, OffloadedOptimizer):
            host += inner.host_tensors()
            disk += inner.disk_tensors()
        else:
            (host if layout.offloads("optimizer") else state).extend(state_tensors(inner))
    if layout.offloads_parameters:  # with the parameters also gradients and optimizer state
        for tensor in (*parameters, *gradients, *state):
            (disk if file is not None and file.holds(tensor) else host).append(tensor)
        # Already counted, in the host's memory or on disk.
        parameters = gradients = state = []
    return Holdings(parameters=parameters, gradients=gradients, optimizer_state=state, host=host, disk=disk)


def state_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    """Every tensor of an optimizer's state, the parts that this rank holds."""
    for values in optimizer.state.values():
        for value in values.values():
            if isinstance(value, Tensor):
                yield local(value)
