"""Labels and ids out of range, which PyTorch finds deep in a forward or a loss: said in one sentence."""

import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from samestep.errors import UserError, one_line, place_of

# What PyTorch's operators say on a CPU: an embedding, a cross-entropy, indexing, gather and scatter, one_hot.
_OUT_OF_RANGE = re.compile(
    r"out of range in self|is out of bounds|index out of range|Class values must be|"
    r"out of bounds for dimension|indices should be"
)
_SHOWN = 8  # samples that a message names


@contextmanager
def in_one_sentence(what: str, samples_of: Callable[[], Sequence[int]] = tuple) -> Iterator[None]:
    """Turn an index error of PyTorch's into a UserError, with the samples of the data set of which `what` was."""
    try:
        yield
    except (IndexError, RuntimeError) as error:
        if not _OUT_OF_RANGE.search(str(error)) or _of_a_list(error):
            raise
        samples = samples_of()
        numbers = ", ".join(str(number) for number in samples[:_SHOWN]) + (", ..." if len(samples) > _SHOWN else "")
        of = f", samples {numbers}" if samples else ""
        place = place_of(error)
        raise UserError(
            f"{what}{of}: a label or an id is out of range ({one_line(error)}){f', at {place}' if place else ''}; "
            "use labels and ids from 0 to the model's number of classes or embeddings less 1"
        ) from error


def _of_a_list(error: BaseException) -> bool:
    """Whether an error is of Python's own sequences: a mistake in code, whose traceback stands."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    by_python = re.match(r"(list|tuple|string|range object|pop|deque|bytearray) ", str(error)) is not None
    return by_python and "torch" not in Path(last.filename).parts
