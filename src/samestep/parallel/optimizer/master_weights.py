"""Master weights: parameters and gradients in bf16, and an optimizer that steps a float32 copy of what it owns.

A rank then holds 2 (parameter) + 2 (gradient) + 12 (copy and two averages of Adam) bytes a parameter, and what is
sharded of it divides by the ranks (Micikevicius et al. 2018, section 3.1; Rajbhandari et al. 2020, section 3.1).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from samestep.parallel.optimizer.joined import loss_of
from samestep.parallel.optimizer.lots import Lot, lots
from samestep.parallel.sharding import local

KEY = "master"  # of the copy in a parameter's state


class MasterWeights(Optimizer):
    """Steps copies of the parameters in `dtype` with an optimizer of the given kind; parameters become them, rounded.

    Its groups hold the parameters themselves, so gradients are zeroed and clipped, and learning rates set, as with
    any optimizer. `state` is that of the copies, and the copy itself under `KEY`.
    """

    def __init__(
        self, params: Iterable[Any], *, kind: Callable[..., Optimizer], dtype: torch.dtype, **settings: Any
    ) -> None:
        super().__init__(params, settings)
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                self._masters[parameter] = nn.Parameter(local(parameter.detach()).to(dtype, copy=True))
        self._lots = [Lot(kind, settings, self.param_groups, lot, self._masters) for lot in lots(self.param_groups)]
        for lot in self._lots:
            lot.complete(self.param_groups)
        for parameter in self._masters:
            self._show(parameter, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = loss_of(closure)
        for lot in self._lots:
            for parameter, master in lot.stepped.items():
                master.grad = None if parameter.grad is None else local(parameter.grad).to(master.dtype)
            lot.step(self.param_groups)
            for parameter, master in lot.stepped.items():
                if master.grad is not None:
                    local(parameter.detach()).copy_(master)
                    master.grad = None
                self._show(parameter, lot.optimizer.state.get(master, {}))
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take state in the dtypes that it has. Without a copy in it, copies become what parameters are now."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            state = dict(state_dict["state"].get(number, {}))
            master = self._masters[parameter]
            with torch.no_grad():
                master.copy_(local(state.pop(KEY, parameter).detach()))
            for lot in self._lots:
                if parameter in lot.stepped and state:
                    lot.optimizer.state[master] = state
            self._show(parameter, state)

    def stepping(self) -> Iterator[Optimizer]:
        """The optimizers that step the copies."""
        for lot in self._lots:
            yield lot.optimizer

    def _show(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
        self.state[parameter] = {**state, KEY: self._masters[parameter].detach()}


def with_masters(kind: Callable[..., Optimizer], dtype: torch.dtype) -> Callable[..., Optimizer]:
    """What makes optimizers of a kind that step copies in `dtype`."""
    return partial(MasterWeights, kind=kind, dtype=dtype)
