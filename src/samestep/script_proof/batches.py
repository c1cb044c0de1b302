"""Records which samples of a data set a DataLoader's batches have, or replays the batches recorded by another run.

An iteration over a DataLoader has a number: the first one that gives a batch has 0. Ranks that run one script, and
the script alone, count the same, so that the run alone can be given the batches of the ranks, one after the other.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.recording.store import RecordWriter, events

Indices = list[int]


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """One pass over a DataLoader, over all ranks."""

    size: int | None  # samples of the data set
    batches: Sequence[Sequence[Indices]]  # of each rank
    ended: bool  # on all ranks, rather than cut off by the end of the run
    made: int | None  # index of the DataLoader's batch sampler, among those that DataLoaders created

    @property
    def joined(self) -> list[Indices]:
        """The ranks' batches concatenated, rank 0's samples first."""
        longest = max((len(batches) for batches in self.batches), default=0)
        return [
            [index for rank in self.batches if number < len(rank) for index in rank[number]]
            for number in range(longest)
        ]

    def grouped(self, together: int) -> list[Indices]:
        """The ranks' batches, so many of them joined in each: of each number rank 0's first."""
        if together in (0, len(self.batches)):
            return self.joined
        longest = max((len(batches) for batches in self.batches), default=0)
        units = [rank[number] for number in range(longest) for rank in self.batches if number < len(rank)]
        groups = [units[at : at + together] for at in range(0, len(units), together)]
        return [[index for unit in group for index in unit] for group in groups]


def iterations(folder: Path) -> dict[int, Iteration]:
    """Read the iterations that a run trained on, by number, except those whose samplers give no integers."""
    ranks_of_iteration: dict[int, list[dict[str, Any]]] = {}
    places = sorted(folder.glob("rank-*/"), key=lambda place: int(place.name.removeprefix("rank-")))
    for place in places:
        for number, one in _of_rank(place).items():
            ranks_of_iteration.setdefault(number, []).append(one)
    return {
        number: Iteration(
            size=ranks[0]["size"],
            batches=[rank["batches"] for rank in ranks],
            ended=all(rank["ended"] for rank in ranks),
            made=ranks[0]["made"],
        )
        for number, ranks in ranks_of_iteration.items()
        if len(ranks) == len(places) and all(rank["trains"] and None not in rank["batches"] for rank in ranks)
    }


def lengths(folder: Path) -> dict[int, int]:
    """Read the lengths of DataLoaders that rank 0 of a run has asked for, by their order."""
    return {event["loader"]: event["value"] for event in events(folder / "rank-0") if event["event"] == "length"}


def _ranks(folder: Path) -> int:
    return len(list(folder.glob("rank-*/")))


def _of_rank(folder: Path) -> dict[int, dict[str, Any]]:
    """Read one rank's iterations, by number: batches, whether it ended, whether it trained."""
    by_number: dict[int, dict[str, Any]] = {}
    for event in events(folder):
        kind, number = event["event"], event.get("iteration", -1)
        if kind == "iteration":
            by_number[number] = {**event, "batches": [], "ended": False, "trains": False}
        elif kind == "indices":
            by_number[number]["batches"].append(event["indices"])
        elif kind == "iteration ends":
            by_number[number]["ended"] = True
        elif kind == "iteration trains":
            by_number[number]["trains"] = True
    return by_number


class Batches:
    """A rank's iterations over its DataLoaders."""

    def __init__(
        self,
        writer: RecordWriter,
        *,
        from_run: Path | None,
        times: int,
        made: Sequence[int],
        number_of: Callable[[Any], int] = lambda _: 0,
        together: int = 0,
    ) -> None:
        """`from_run`: the run whose batches are replayed. `times`: factor on the batch size of the samplers `made`.

        `number_of`: the number of a data set. `together`: how many of that run's batches, of all ranks, are one;
        0: one of each rank.
        """
        self._together = together
        self._asked: list[Any] = []  # DataLoaders whose length the script has asked for; kept alive
        self._lengths = lengths(from_run) if from_run is not None and together in (0, _ranks(from_run)) else {}
        self._writer = writer
        self._given: Mapping[int, Iteration] = iterations(from_run) if from_run is not None else {}
        self._times = times
        self._widened = set(made)
        self._samplers: list[Any] = []  # created by DataLoaders; kept alive, so that no id is reused
        self._count = 0
        self._given_since: list[int] = []  # iterations of the batches since the last forward
        self._evaluated = False
        self._datasets = number_of
        self._training: set[int] = set()

    def loader_made(self, loader: Any) -> None:
        """Register a DataLoader that created its own batch sampler."""
        if self._times > 1 and len(self._samplers) in self._widened:
            loader.batch_sampler.batch_size *= self._times
        self._samplers.append(loader.batch_sampler)

    def iterator_made(self, indices: Iterator[Any], loader: Any) -> Iterator[Any]:
        """Wrap the index iterator of a DataLoader's iterator."""
        return _Noted(indices, lambda: self._begun(loader), self, self._datasets(loader.dataset))

    def _begun(self, loader: Any) -> int:
        """Number an iteration when its first batch is requested."""
        number, self._count = self._count, self._count + 1
        made = next((at for at, sampler in enumerate(self._samplers) if sampler is loader.batch_sampler), None)
        data = self._datasets(loader.dataset)
        self._writer.event("iteration", iteration=number, size=_size(loader.dataset), made=made, data=data)
        return number

    def instead(self, number: int, indices: Iterator[Any]) -> Iterator[Any]:
        """Return the other run's batches, if it trained on this iteration."""
        other = self._given.get(number)
        if other is None:
            return indices
        next(indices, None)  # advances the random generator as without a replay
        return iter(other.grouped(self._together))

    def length(self, loader: Any, value: int) -> int:
        """Record a DataLoader's length that the script asks for; return the ranks' if their batches are given."""
        number = next((at for at, other in enumerate(self._asked) if other is loader), len(self._asked))
        if number == len(self._asked):
            self._asked.append(loader)
            self._writer.event("length", loader=number, value=value)
        return self._lengths.get(number, value)

    def noted(self, number: int, indices: Any) -> None:
        self._writer.event("indices", iteration=number, indices=_whole_numbers(indices))

    def ended(self, number: int) -> None:
        self._writer.event("iteration ends", iteration=number)

    def given(self, indices: Any) -> list[str] | None:
        """Remember the iteration of the last batch; return its samples' names, if they have numbers."""
        if not isinstance(indices, _Noted):
            return None
        if self._evaluated:
            self._given_since, self._evaluated = [], False
        if indices.number is not None:
            self._given_since.append(indices.number)
        return indices.taken()

    def trained(self) -> None:
        """Record that a model is trained on the iterations of the last batches."""
        for number in dict.fromkeys(self._given_since):
            if number not in self._training:
                self._training.add(number)
                self._writer.event("iteration trains", iteration=number)
        self._given_since, self._evaluated = self._given_since[-1:], False

    def evaluated(self) -> None:
        """The last batches were for an evaluation, if no training follows before the next batch: a teacher may."""
        self._evaluated = True


class _Noted:
    """Iterator over lists of indices that records each."""

    def __init__(self, indices: Iterator[Any], begun: Callable[[], int], batches: Batches, data: int) -> None:
        self._indices = indices
        self._data = data
        self._waiting: deque[Indices | None] = deque()  # of batches that the script doesn't have yet
        self._begun = begun
        self._batches = batches
        self.number: int | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Return the next indices, recorded, or the split run's in their place."""
        if self.number is None:
            self.number = self._begun()
            self._indices = self._batches.instead(self.number, self._indices)
        try:
            indices = next(self._indices)
        except StopIteration:
            self._batches.ended(self.number)
            raise
        self._batches.noted(self.number, indices)
        self._waiting.append(_whole_numbers(indices))
        return indices

    def taken(self) -> list[str] | None:
        """Return the names of the next batch's samples; None if they have no numbers."""
        numbers = self._waiting.popleft() if self._waiting else None
        return None if numbers is None else [f"{self._data}:{number}" for number in numbers]


def _whole_numbers(indices: Any) -> Indices | None:
    """Indices as whole numbers; None for those of a sampler that gives something else."""
    try:
        return [index.__index__() for index in indices]
    except (AttributeError, TypeError):
        return None


def _size(dataset: Any) -> int | None:
    """The data set's length; None for one without."""
    try:
        return len(dataset)
    except TypeError:
        return None
