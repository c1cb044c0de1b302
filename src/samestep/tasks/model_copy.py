"""Copies of models, also of such as keep tensors of a finished forward."""

from collections.abc import Iterator
from copy import deepcopy

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from samestep.errors import UserError, described


def copied(model: nn.Module) -> nn.Module:
    """A copy of a model, also of one that keeps what a forward has computed, such as the states of RecurrentGemma.

    Raises UserError where the model can't be copied.
    """
    # PyTorch copies no tensor of a graph; what of a finished forward is kept has no backward any more.
    values = {id(tensor): tensor.detach().clone() for tensor in computed_in(model)}
    try:
        return deepcopy(model, values)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise UserError(f"model= can't be copied ({described(error)}); use a function that builds it") from error


def computed_in(model: nn.Module) -> Iterator[Tensor]:
    """The tensors of a graph that a forward has left in attributes of a model's modules."""
    for module in model.modules():
        attributes = {name: value for name, value in vars(module).items() if name != "_modules"}
        yield from (leaf for leaf in pytree.tree_leaves(attributes) if isinstance(leaf, Tensor) and not leaf.is_leaf)
