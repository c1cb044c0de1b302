"""Low-rank adapters next to a frozen linear layer (LoRA, Hu et al. 2021, section 4.1): our own, and those of PEFT.

An adapted layer computes base(x) + scaling * up(down(dropout(x))), in which `down` goes from the inputs to a few
features (the rank) and `up` from there to the outputs. Its base keeps its names: `q_proj.weight` is still called so,
next to `q_proj.lora_A.weight`. PEFT wraps the layer instead: `q_proj.base_layer.weight`.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from samestep.torch_internals.modules import own_parameters

DOWN, UP, DROPOUT = "lora_A", "lora_B", "lora_dropout"  # as PEFT calls them


@dataclass(frozen=True, kw_only=True)
class Update:
    """A low-rank update of a linear layer; modules are given by their names relative to the layer."""

    down: str  # nn.Linear, weight [rank, inputs]
    up: str  # nn.Linear, weight [outputs, rank]
    dropout: str
    scaling: float


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """The base layer and the low-rank updates of an adapted layer."""

    base: str  # the relative name of the module with weight and bias; empty: the layer itself
    updates: tuple[Update, ...]


class _LowRank(nn.Module):
    """Mixin with the forward of a linear layer and its adapter; an adapted layer's class derives from it and its own.

    Input [..., inputs], output [..., outputs].
    """

    lora_A: nn.Linear  # noqa: N815 - PEFT's names, which its files have
    lora_B: nn.Linear  # noqa: N815
    lora_dropout: nn.Dropout
    lora_scaling: float

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.lora_B(self.lora_A(self.lora_dropout(input))) * self.lora_scaling


@cache
def _with_adapter(kind: type[nn.Module]) -> type[nn.Module]:
    """Make the class of an adapted layer of a kind; cached, so that equal kinds give equal types."""
    return type(f"LowRank{kind.__name__}", (_LowRank, kind), {"__module__": __name__})


def can_adapt(module: nn.Module) -> bool:
    """Whether a module is a linear layer as PyTorch or transformers computes it, without an adapter as yet."""
    plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    holds = isinstance(own_parameters(module).get("weight"), Tensor) and not is_parametrized(module)
    if holds and is_lazy(module.get_parameter("weight")):  # it has no sizes yet
        return False
    return (plain or is_conv1d(module)) and holds and adapted(module) is None


def adapt(layer: nn.Module, *, rank: int, scaling: float, dropout: float) -> None:
    """Put an adapter next to a linear layer, in place, and freeze the layer.

    At first it adds zero: `down` is drawn as PyTorch draws a linear layer, `up` is zero. What it adds is multiplied
    by `scaling`.
    """
    weight = layer.get_parameter("weight")
    outputs, inputs = reversed(weight.shape) if is_conv1d(layer) else weight.shape
    layer.requires_grad_(False)
    like: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
    down, up = nn.Linear(inputs, rank, bias=False, **like), nn.Linear(rank, outputs, bias=False, **like)
    nn.init.zeros_(up.weight)
    for name, module in ((DOWN, down), (UP, up), (DROPOUT, nn.Dropout(dropout))):
        layer.add_module(name, module)
    vars(layer)["lora_scaling"] = scaling
    # The same object, so that its name, its hooks and other modules' references to it stay.
    layer.__class__ = _with_adapter(type(layer))


def adapted(module: nn.Module) -> Adapted | None:
    """Describe an adapted layer; None for other modules, and for adapters that are more than low-rank updates.

    Of PEFT's layers, only plain active adapters are supported: no DoRA or other variants, and none that are merged.
    """
    if isinstance(module, _LowRank):
        update = Update(down=DOWN, up=UP, dropout=DROPOUT, scaling=module.lora_scaling)
        return Adapted(base="", updates=(update,))
    # Only a model that PEFT made has its layers, so there is nothing to import.
    kinds: Any = sys.modules.get("peft.tuners.lora.layer")
    if kinds is None or type(module) is not kinds.Linear:
        return None
    return _of_peft(module)


def _of_peft(layer: Any) -> Adapted | None:
    base = layer.base_layer
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    plain_base = (type(base).forward is nn.Linear.forward or is_conv1d(base)) and not is_parametrized(base)
    plain = not layer.merged and not layer.disable_adapters and not any(name in layer.lora_variant for name in active)
    if not plain_base or not plain or any(layer.lora_B[name].bias is not None for name in active):
        return None
    updates = tuple(
        Update(
            down=f"{DOWN}.{name}",
            up=f"{UP}.{name}",
            dropout=f"{DROPOUT}.{name}",
            scaling=layer.scaling[name],
        )
        for name in active
    )
    return Adapted(base="base_layer", updates=updates)


def base_of(layer: nn.Module) -> nn.Module:
    """The module with the weight and the bias of a linear layer, adapted or not."""
    adapter = adapted(layer)
    return layer if adapter is None else layer.get_submodule(adapter.base)


def updates_of(layer: nn.Module) -> Callable[[Tensor, Callable[[], Any]], Tensor] | None:
    """Make a function from a layer's input [..., inputs] to the sum of its adapters' outputs; None without adapters.

    The function's second argument makes the context in which dropout is applied to the input.
    """
    adapter = adapted(layer)
    if adapter is None or not adapter.updates:
        return None
    parts = [
        (
            layer.get_submodule(update.dropout),
            layer.get_submodule(update.down),
            layer.get_submodule(update.up),
            update.scaling,
        )
        for update in adapter.updates
    ]

    def add(x: Tensor, around_dropout: Callable[[], Any]) -> Tensor:
        total: Tensor | None = None
        for dropout, down, up, scaling in parts:
            with around_dropout():
                dropped = dropout(x)
            update = up(down(dropped)) * scaling
            total = update if total is None else total + update
        assert total is not None
        return total

    return add


def adapted_layers(model: nn.Module) -> Mapping[str, Adapted]:
    """The adapted layers of a model, by name."""
    layers = {name: adapted(module) for name, module in model.named_modules()}
    return {name: layer for name, layer in layers.items() if layer is not None}


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D, GPT-2's linear layer, whose weight is [inputs, outputs]."""
    # Only transformers' own models have one, so if it is not imported yet, this module is none.
    kinds: Any = sys.modules.get("transformers.pytorch_utils")
    return kinds is not None and isinstance(module, kinds.Conv1D)
