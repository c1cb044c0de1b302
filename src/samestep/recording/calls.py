"""Listens to the forwards of models: the outermost call of a module, and the calls of modules inside of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from samestep.recording.activations import Activations

Call = Callable[..., Any]


class ModelCalls:
    """Tracks nested module calls, and records outputs within a model's forward if requested.

    `begins` decides whether an outermost call is a forward to track; it may set `activations` to have outputs
    recorded. `ends` receives the forward's result before the caller does.
    """

    def __init__(self, begins: Callable[[nn.Module, Any, Any], bool], ends: Callable[[Any], None]) -> None:
        self.activations: Activations | None = None
        self._begins = begins
        self._ends = ends
        self._depth = 0  # nesting depth of module calls

    @property
    def inside(self) -> bool:
        """Whether a forward is under way."""
        return self._depth > 0

    def called(self, call: Call, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call the original nn.Module.__call__, `call`, and track it."""
        if self._depth == 0 and not self._begins(module, args, kwargs):
            return call(module, *args, **kwargs)
        self._depth += 1
        try:
            result = call(module, *args, **kwargs)
        finally:
            self._depth -= 1
        if self.activations is not None:
            self.activations.add(module, result)
        if self._depth == 0:
            self._ends(result)
        return result

    def take_activations(self) -> list[dict[str, Any]] | None:
        """Return and clear what was recorded since the forward began; None if nothing was requested."""
        activations, self.activations = self.activations, None
        return activations.to_json() if activations is not None else None


def listen_to_modules(called: Callable[[Call, nn.Module, Any, Any], Any]) -> Callable[[], None]:
    """Route every module call through `called`, except under torch.compile; returns the function that ends it."""
    call = nn.Module.__call__

    def through(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """nn.Module.__call__ while something listens; a compiler sees the plain call."""
        if torch.compiler.is_compiling():
            return call(module, *args, **kwargs)
        return called(call, module, args, kwargs)

    def end() -> None:
        nn.Module.__call__ = call

    nn.Module.__call__ = through
    return end
