"""The generators of random numbers that a process has, and what has drawn from them.

A forward whose draws are all answered by sample number (see `draws`) leaves PyTorch's generators as they were. One
that draws elsewhere, in a kernel of PyTorch, from NumPy or from Python's `random`, moves one of them. Code that
draws from Python's and uses the number for nothing that it computes, as a checker of types does that looks at some
elements of a list, is told apart by other numbers (`that_matters`).
"""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch

State = tuple[tuple[str, Any], ...]
T = TypeVar("T")

OTHERS = ("Python's", "NumPy's")  # generators that aren't PyTorch's, by what they are called in messages


def state_of_torch(device: torch.device) -> State:
    """The states of PyTorch's generators, by what they are called in messages."""
    states: list[tuple[str, Any]] = [("PyTorch's", torch.get_rng_state().numpy().tobytes())]
    if device.type not in ("cpu", "meta"):
        states.append(("the accelerator's", torch.get_device_module(device).get_rng_state(device).numpy().tobytes()))
    return tuple(states)


def restore_torch(before: State, device: torch.device) -> None:
    """Restore the states of PyTorch's generators from `state_of_torch`."""
    setters = [torch.set_rng_state]
    if device.type not in ("cpu", "meta"):
        setters.append(partial(torch.get_device_module(device).set_rng_state, device=device))
    for set_state, (_, value) in zip(setters, before, strict=True):
        set_state(torch.frombuffer(bytearray(value), dtype=torch.uint8))


def state(device: torch.device) -> State:
    """The state of each generator, also of Python's and NumPy's."""
    states = [*state_of_torch(device), (OTHERS[0], hash(random.getstate()))]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, position, *rest = numpy.random.get_state()
        states.append((OTHERS[1], (int(keys[0]), int(keys[-1]), position, tuple(rest))))
    return tuple(states)


def moved(before: State, after: State) -> str | None:
    """The name of the first generator whose state has changed; None if none has."""
    return next((name for (name, a), (_, b) in zip(before, after, strict=True) if a != b), None)


@contextmanager
def seedings_taken_back(device: torch.device) -> Iterator[None]:
    """Restore PyTorch's generators afterwards where code inside has seeded them and has drawn nothing.

    Reversible layers seed the generator in each forward, so that their backward draws the same once more: with
    dropout of 0 nothing is drawn, and the seed decides nothing.
    """
    before = last = state_of_torch(device)
    drawn = seeded = False

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def set_seed(*arguments: Any, **keywords: Any) -> Any:
            nonlocal last, drawn, seeded
            drawn = drawn or moved(last, state_of_torch(device)) is not None
            result = function(*arguments, **keywords)
            last, seeded = state_of_torch(device), True
            return result

        return set_seed

    names = [(place, name) for place in (torch, torch.random) for name in ("manual_seed", "seed", "set_rng_state")]
    functions = [getattr(place, name) for place, name in names]
    for (place, name), function in zip(names, functions, strict=True):
        setattr(place, name, noting(function))
    try:
        yield
    finally:
        for (place, name), function in zip(names, functions, strict=True):
            setattr(place, name, function)
        if seeded and not drawn and moved(last, state_of_torch(device)) is None:
            restore_torch(before, device)


# The state of a Mersenne Twister, which Python's and NumPy's generators are, is 624 words, each of which gives one
# number. The state's word that gives 0 is 0; the following one gives 2^32 - 1.
_WORDS, _GIVES_MOST = 624, 0x12DD9BB3
# After so many extremes random words follow, as code may draw until a number fits.
_EXTREMES = 400
_CALLS = 10


def that_matters(before: State, after: State, function: Callable[[], T], alike: Callable[[T, T], bool]) -> str | None:
    """The name of the first generator that was drawn from between two states and matters; None if there is none.

    PyTorch's always matter. Another one does if what `function` gives depends on it: what it gave with these numbers
    and with others is not `alike`.
    """
    moved_ones = [name for (name, a), (_, b) in zip(before, after, strict=True) if a != b]
    return next((name for name in moved_ones if name not in OTHERS or _depends(name, function, alike)), None)


def _depends(who: str, function: Callable[[], T], alike: Callable[[T, T], bool]) -> bool:
    """Whether what a function gives depends on the numbers that it draws from Python's or NumPy's generator.

    It is called with numbers of which each is the smallest or the largest, at random: whatever is done with a
    probability, however small, is done in half of the calls. The first call has random numbers.
    """
    with _python_kept():
        first: list[T] = []
        for number in range(1 + _CALLS):
            for name in OTHERS:  # of the other generator the same numbers each time
                _answer(name, number if name == who else 0)
            result = function()
            if first and not alike(first[0], result):
                return True
            first = first or [result]
    return False


def _answer(who: str, seed: int) -> None:
    """Let a generator give numbers that are the smallest or the largest first; with seed 0 random ones alone."""
    of_seed = random.Random(seed)
    words = [of_seed.getrandbits(32) for _ in range(_WORDS)]
    if seed:
        words[:_EXTREMES] = of_seed.choices((0, _GIVES_MOST), k=_EXTREMES)
    numpy: Any = sys.modules.get("numpy")
    if who == OTHERS[0]:
        random.setstate((3, (*words, 0), None))
    elif numpy is not None:
        numpy.random.set_state(("MT19937", words, 0, 0, 0.0))


@contextmanager
def _python_kept() -> Iterator[None]:
    """Restore the states of Python's and NumPy's generators afterwards."""
    before, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_before = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(numpy_before)


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
