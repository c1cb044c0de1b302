"""ForwardContext: the samples and tokens of the running forward, for results that must not depend on the rank."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from samestep.data.loader import Moment

# The position of a part of a dimension in the whole: of its first element, or of each element (int64).
Positions = int | Tensor


@dataclass(frozen=True, kw_only=True)
class Portion:
    """The part of the whole model's tensors that this rank computes; dimensions that aren't listed are whole.

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
    """A pre-hook of the first block that records the number of tokens before they are split.

    Every pipeline stage needs the number: on other stages the first block's stand-in calls the hook.
    """

    def __init__(self, note: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> None:
        self._note = note

    def __call__(self, _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._note(arguments, keywords)


class ForwardContext:
    """The samples of the running forward; none outside of training. One object for each model, shared by its parts.

    It determines the random numbers of draws, the ranks over which batch norm takes statistics, and whether a forward
    may change state. It is the only state that forwards share; `keep` takes a snapshot of it for recomputation, which
    runs when the context has already moved to another micro-batch.
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
        """The part of the tensors that the running code computes."""
        return self._state.part

    @property
    def recomputing(self) -> bool:
        """Whether a forward runs again, in backward or in a rehearsal, and so must not change the model's state."""
        return self._state.recomputing

    @contextmanager
    def at(self, moment: Moment) -> Iterator[None]:
        """Context of a forward of these samples."""
        with self._as(_State(moment=moment)):
            yield

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Context of a forward that should draw nothing; the caller checks that no generator's state has changed."""
        self.watches = False
        try:
            yield
        finally:
            self.watches = True

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Context of code that runs an additional time within a forward, and must not change the model's state."""
        with self._as(replace(self._state, calls=dict(self._state.calls), recomputing=True)):
            yield

    @contextmanager
    def holding(self, part: Portion) -> Iterator[None]:
        """Context of code that only computes `part` of the whole model's tensors."""
        with self._as(replace(self._state, part=part)):
            yield

    def hold(self, part: Portion) -> Portion:
        """Set the part for code that begins in one module and ends in another; returns the previous part."""
        before = self._state.part
        self._state = replace(self._state, part=part)
        return before

    def count(self, name: str) -> int:
        """The number of earlier calls with this name in this forward."""
        calls = self._state.calls
        number = calls.get(name, 0)
        calls[name] = number + 1
        return number

    def skip(self, name: str, draws: int) -> None:
        """Count draws of a module that other code, such as another stage, has run in this forward."""
        self._state.calls[name] = self._state.calls.get(name, 0) + draws

    def note_tokens(self, of: object, tokens: int) -> None:
        """Record the total number of tokens of a list of blocks in this forward."""
        self._state.tokens[of] = tokens

    def tokens(self, of: object) -> int:
        """The total number of tokens of a list of blocks in this forward; 0 before it is recorded."""
        return self._state.tokens.get(of, 0)

    def keep(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that is called once in this forward and again in backward.

        The first call is the forward itself, within the running context. Every later call is a recomputation: it runs
        in the context of the first call, with `recomputing` set and the counts of draws restored, so that it draws
        the same numbers.
        """
        if self._state.moment is None:
            return function
        # Copies, since this forward continues, and other micro-batches may run before backward.
        state = self._state
        recomputed = replace(state, calls=dict(state.calls), tokens=dict(state.tokens), recomputing=True)
        forward_done = False

        def run(*arguments: Any, **keywords: Any) -> Any:
            nonlocal forward_done
            if not forward_done:
                forward_done = True
                return function(*arguments, **keywords)
            with self._as(replace(recomputed, calls=dict(recomputed.calls))):
                return function(*arguments, **keywords)

        return run

    @contextmanager
    def _as(self, state: _State) -> Iterator[None]:
        """Context with another state; the previous one is restored at the end."""
        before, self._state = self._state, state
        try:
            yield
        finally:
            self._state = before
