"""ForwardContext: which samples and tokens the running forward has, for what must not depend on its rank."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from samestep.data.loader import Moment

# Where a part of a dimension lies in the whole: the position of its first element, or of each (int64).
Positions = int | Tensor


@dataclass(frozen=True, kw_only=True)
class Portion:
    """Which part of the whole model's tensors this rank computes; a dimension that isn't named is whole.

    Dimensions are counted with the samples as dimension 0: [samples, tokens, features].
    """

    activations: Mapping[int, Positions] = field(default_factory=dict)  # may be negative: -1 is the last one
    attention: Mapping[int, Positions] = field(default_factory=dict)  # of [samples, heads, queries, keys]


_WHOLE = Portion()


@dataclass(frozen=True, kw_only=True)
class _State:
    """Everything that `ForwardContext` says of a running forward; replaced as a whole, never changed in place."""

    moment: Moment | None = None
    # Running numbers of draws by module name: they tell two draws of one module apart.
    calls: dict[str, int] = field(default_factory=dict)
    part: Portion = _WHOLE
    recomputing: bool = False
    tokens: dict[object, int] = field(default_factory=dict)  # in all, of each list of blocks whose tokens are split


class NotesTokens:
    """A hook at the first of some blocks that notes how many tokens there are before they are split.

    Every stage of a pipeline wants to know, also one that has other blocks: there the hook is called by what stands
    for the first one.
    """

    def __init__(self, note: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> None:
        self._note = note

    def __call__(self, _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._note(arguments, keywords)


class ForwardContext:
    """Which samples the running forward works on; none outside of training. One a model, shared by its parts.

    What follows from it: which random numbers a draw gives, whose statistics batch norm takes, whether a forward may
    leave a trace. It is the only state that forwards share, and `keep` takes a snapshot of it for a recomputation,
    which runs when the context has gone on to another micro-batch.
    """

    def __init__(self) -> None:
        self._state = _State()
        self.drew = False  # whether any forward has drawn numbers by sample number
        self.watches = True  # whether forwards are watched for draws

    @property
    def moment(self) -> Moment | None:
        return self._state.moment

    @property
    def part(self) -> Portion:
        """Which part of its tensors the running code computes."""
        return self._state.part

    @property
    def recomputing(self) -> bool:
        """Whether backward computes activations again, which must leave no further trace in the model."""
        return self._state.recomputing

    @contextmanager
    def at(self, moment: Moment) -> Iterator[None]:
        """A forward of these samples."""
        with self._as(_State(moment=moment)):
            yield

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """A forward that is not expected to draw anything; who calls it looks whether a generator has moved."""
        self.watches = False
        try:
            yield
        finally:
            self.watches = True

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Code that runs once more within the same forward, which must leave no trace in the model."""
        with self._as(replace(self._state, calls=dict(self._state.calls), recomputing=True)):
            yield

    @contextmanager
    def holding(self, part: Portion) -> Iterator[None]:
        """Code that computes only a part of the whole model's tensors."""
        with self._as(replace(self._state, part=part)):
            yield

    def hold(self, part: Portion) -> Portion:
        """The same for code that begins in one module and ends in another; what held before, to be given back."""
        before = self._state.part
        self._state = replace(self._state, part=part)
        return before

    def count(self, name: str) -> int:
        """How often this was asked for a name in this forward: its running number, from 0."""
        calls = self._state.calls
        number = calls.get(name, 0)
        calls[name] = number + 1
        return number

    def skip(self, name: str, draws: int) -> None:
        """Count as `count` does, for a module of which other code has run this forward's next draws."""
        self._state.calls[name] = self._state.calls.get(name, 0) + draws

    def note_tokens(self, of: object, tokens: int) -> None:
        """Note how many tokens a list of blocks has in all in this forward."""
        self._state.tokens[of] = tokens

    def tokens(self, of: object) -> int:
        """How many tokens a list of blocks has in all, as this forward noted; 0 before."""
        return self._state.tokens.get(of, 0)

    def keep(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function to call once in this forward and again in backward, where it finds what it found before.

        The first call is the forward itself, within the running context. Every later one is a recomputation: it gets
        the context of then, with `recomputing` set and counts of draws as they stood, so that it draws the same
        numbers.
        """
        if self._state.moment is None:
            return function
        # Copies, since this forward goes on, and another micro-batch's may come before backward.
        state = self._state
        found = replace(state, calls=dict(state.calls), tokens=dict(state.tokens), recomputing=True)
        forward_done = False

        def run(*arguments: Any, **keywords: Any) -> Any:
            nonlocal forward_done
            if not forward_done:
                forward_done = True
                return function(*arguments, **keywords)
            with self._as(replace(found, calls=dict(found.calls))):
                return function(*arguments, **keywords)

        return run

    @contextmanager
    def _as(self, state: _State) -> Iterator[None]:
        """Code for which another state holds; the state before comes back, however the code ends."""
        before, self._state = self._state, state
        try:
            yield
        finally:
            self._state = before
