"""Reader and Writer: what a format can do, and what a user may say beside the file."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samestep.job import Job
from samestep.layout import Layout
from samestep.translate.draft import Draft


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line says, and many of these files don't: sizes of the whole training."""

    processes: int | None = None
    batch: int | None = None


@dataclass(frozen=True, kw_only=True)
class Written:
    """A file's text, and what of the job could not be said in it."""

    text: str
    remarks: Sequence[str] = ()


class Reader(ABC):
    """Makes a job's draft of another tool's configuration."""

    title: str  # of such a file, in messages and comments

    @abstractmethod
    def recognises(self, given: Any) -> bool:
        """Whether this content is of the format: what the file holds (a dictionary, say), or its text."""

    @abstractmethod
    def read(self, given: Any, asked: Asked) -> Draft:
        """Raises UserError for values that are wrong or contradict each other."""


class Writer(ABC):
    """Makes another tool's configuration of a job."""

    @abstractmethod
    def write(self, job: Job, layout: Layout) -> Written:
        """Raises UserError for what the tool could not run as the job says."""


def has_any(content: Any, keys: Sequence[str]) -> bool:
    """Whether the content is a section with one of these keys."""
    return isinstance(content, Mapping) and any(key in content for key in keys)
