"""What a contract is: the variables and arguments that an engine's scripts expect, written from a rank's place."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from samestep.errors import UserError
from samestep.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What a contract is written from."""

    ranks: Ranks
    environ: Mapping[str, str]  # as the launcher left it
    threads: int
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def node(self) -> int:
        """The number of this rank's host among the job's."""
        given = self.environ.get("GROUP_RANK", "")
        return int(given) if given.isdecimal() else self.ranks.rank // self.ranks.local_world_size

    @property
    def nodes(self) -> int:
        """Hosts of the job, of as many ranks as this one where the launcher doesn't say."""
        given = self.environ.get("GROUP_WORLD_SIZE", "")
        return int(given) if given.isdecimal() else -(-self.ranks.world_size // self.ranks.local_world_size)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a script finds when it starts."""

    variables: Mapping[str, str]
    arguments: tuple[str, ...] = ()  # before the script's own
    # Address and port of a rank's presence: the script is ended, in good order, when that rank has ended.
    as_long_as: tuple[str, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Contract:
    """An engine's."""

    expected: Callable[[Rank], Expected]  # every rank calls it, since some agree on addresses and ports
    options: Mapping[str, str] = field(default_factory=dict)  # by name, with what each takes
    check: Callable[[Mapping[str, str]], None] = lambda options: None  # raises UserError for a wrong option
    package: str | None = None  # of Python, without which the ranks can't be told what they expect
    installs: str = ""  # what would install it


def whole_number(name: str, text: str, least: int) -> int:
    """The value of an option. Raises UserError where it is no whole number, or too small."""
    if text.isdecimal() and int(text) >= least:
        return int(text)
    raise UserError(f"--engine: {name}={text}; it must be a whole number of {least} or more")
