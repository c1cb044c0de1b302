"""Attributes of a model's modules as they were, so that what a look or a try has changed can be taken back."""

from torch import nn


class Attributes:
    """What the modules of a model keep: their attributes, and the contents of their dictionaries, lists and sets.

    Parameters, buffers, hooks and replaced forwards are among them. Tensors are kept by reference, not copied.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before = [(module, dict(vars(module))) for module in dict.fromkeys(model.modules())]
        self._contents = [
            (value, value.copy())
            for _, attributes in self._before
            for value in attributes.values()
            if isinstance(value, (dict, list, set))
        ]

    def restore(self) -> None:
        for module, attributes in self._before:
            vars(module).clear()
            vars(module).update(attributes)
        for holder, content in self._contents:
            holder.clear()
            (holder.extend if isinstance(holder, list) else holder.update)(content)
