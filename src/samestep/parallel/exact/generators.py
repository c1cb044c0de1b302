"""The generators of random numbers that a process has, and what has drawn from them.

A forward whose draws are all answered by sample number (see `draws`) leaves PyTorch's generators as they were. One
that draws elsewhere, in a kernel of PyTorch, from NumPy or from Python's `random`, moves one of them.
"""

import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

State = tuple[tuple[str, Any], ...]


def state_of_torch(device: torch.device) -> State:
    """The states of PyTorch's generators, by what they are called in messages."""
    found: list[tuple[str, Any]] = [("PyTorch's", torch.get_rng_state().numpy().tobytes())]
    if device.type not in ("cpu", "meta"):
        found.append(("the accelerator's", torch.get_device_module(device).get_rng_state(device).numpy().tobytes()))
    return tuple(found)


def restore_torch(before: State, device: torch.device) -> None:
    """Restore the states of PyTorch's generators from `state_of_torch`."""
    setters = [torch.set_rng_state]
    if device.type not in ("cpu", "meta"):
        setters.append(partial(torch.get_device_module(device).set_rng_state, device=device))
    for set_state, (_, value) in zip(setters, before, strict=True):
        set_state(torch.frombuffer(bytearray(value), dtype=torch.uint8))


def state(device: torch.device) -> State:
    """The state of each generator, also of Python's and NumPy's."""
    found = [*state_of_torch(device), ("Python's", hash(random.getstate()))]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, position, *rest = numpy.random.get_state()
        found.append(("NumPy's", (int(keys[0]), int(keys[-1]), position, tuple(rest))))
    return tuple(found)


def moved(before: State, after: State) -> str | None:
    """The name of the first generator whose state has changed; None if none has."""
    return next((name for (name, a), (_, b) in zip(before, after, strict=True) if a != b), None)


def line_that_draws(function: Callable[[], Any], device: torch.device, who: str) -> str | None:
    """Call a function again, and find the line that changes the state of generator `who`: "model.py:31", or None.

    For lines of PyTorch and of this package, the line that called them is returned.
    """
    watch = _Watch(device, who)
    before = sys.gettrace()
    sys.settrace(watch.call)
    try:
        function()
    finally:
        sys.settrace(before)
    return watch.found


_PASSED_OVER = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<")


def is_foreign(file: str, passed_over: Sequence[str] = _PASSED_OVER) -> bool:
    """Whether a source file is neither PyTorch's nor this package's."""
    return not file.startswith(tuple(passed_over))


class _Watch:
    """A trace function that checks after every line whether it has changed a generator's state.

    `sys.settrace` calls `call` for each new frame, and the function that it returns before each line of that frame.
    So a change is detected when the next line begins, and `line` is the line before, which made it. This is slow, and
    is only run for an error message.
    """

    def __init__(self, device: torch.device, who: str) -> None:
        self._device = device
        self._who = who
        self._last = self._state()
        self.found: str | None = None

    def call(self, frame: FrameType, event: str, argument: Any) -> Any:
        """The global trace function, called when a function begins. Returns the local one, for each line."""
        if self.found is not None or not is_foreign(frame.f_code.co_filename):
            return None
        self._look(frame.f_back)  # draws of the caller's line before the call
        line = frame.f_lineno

        def local(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal line
            self._look(frame, line)
            line = frame.f_lineno
            return local

        return local

    def _state(self) -> Any:
        return dict(state(self._device))[self._who]

    def _look(self, frame: FrameType | None, line: int | None = None) -> None:
        """Attribute a change since the last check to a frame's line, or to that of its first foreign caller."""
        now = self._state()
        if self._last == now:
            return
        while frame is not None and not is_foreign(frame.f_code.co_filename):
            frame, line = frame.f_back, None
        if self.found is None and frame is not None:
            self.found = f"{frame.f_code.co_filename}:{line or frame.f_lineno}"
        self._last = now
