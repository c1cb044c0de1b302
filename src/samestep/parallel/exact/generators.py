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
    """Set PyTorch's generators back to what `state_of_torch` found."""
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
    """Whose generator has moved: the first of them; None where all are as they were."""
    return next((name for (name, a), (_, b) in zip(before, after, strict=True) if a != b), None)


def line_that_draws(function: Callable[[], Any], device: torch.device, who: str) -> str | None:
    """Call a function again and find the line whose run moves a generator, `moved`'s: "model.py:31"; or None.

    Lines of PyTorch and of this package are passed over: what is named is the line that called them.
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
    """Whether a source file is the user's, or a library's of theirs: neither PyTorch's nor this package's."""
    return not file.startswith(tuple(passed_over))


class _Watch:
    """A trace function: after every line it looks whether that line has moved a generator.

    `sys.settrace` calls `call` for each new frame and the function that it returns before each line of that frame, so
    a change is seen when the next line begins: `line` is the one before, which made it. Slow, and run once for a
    message.
    """

    def __init__(self, device: torch.device, who: str) -> None:
        self._device = device
        self._who = who
        self._last = self._state()
        self.found: str | None = None

    def call(self, frame: FrameType, event: str, argument: Any) -> Any:
        """What Python calls as a function begins; the local trace function is called before each of its lines."""
        if self.found is not None or not is_foreign(frame.f_code.co_filename):
            return None
        self._look(frame.f_back)  # what the caller's line drew before it called this
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
        """Blame what has moved since the last look on a frame's line, or on that of its first foreign caller."""
        now = self._state()
        if self._last == now:
            return
        while frame is not None and not is_foreign(frame.f_code.co_filename):
            frame, line = frame.f_back, None
        if self.found is None and frame is not None:
            self.found = f"{frame.f_code.co_filename}:{line or frame.f_lineno}"
        self._last = now
