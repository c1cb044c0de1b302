"""What other distributions add to samestep's tables, which they declare as entry points in their pyproject.toml.

samestep's own entries stand in tables instead (`samestep.engines`, `samestep.comm.compression`), so that they are
found in a clone that isn't installed. A shipped name always means the shipped entry.
"""

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from samestep.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Plugins:
    """A kind of entry that other distributions may add."""

    group: str  # of their entry points
    key: str  # of a job file, which takes their names
    base: str  # the class that an entry must be a subclass of, for messages

    def names(self) -> list[str]:
        """The names that installed distributions declare. Imports none of them."""
        return sorted(entry_points(group=self.group).names)

    def load(self, name: str, base: type = object) -> type | None:
        """Import the class of that name; None where no distribution declares it.

        Raises UserError where two declare it, it can't be imported, or it is no subclass of `base`.
        """
        declared = list(entry_points(group=self.group, name=name))
        if not declared:
            return None
        place = f'{self.key} is "{name}"'
        if len(declared) > 1:
            packages = " and ".join(sorted(_package(entry) for entry in declared))
            raise UserError(f"{place}, which {packages} declare; uninstall all but one of them")
        (entry,) = declared
        try:
            entry_class = entry.load()
        except Exception as error:  # whatever the code of another distribution raises
            raise UserError(
                f"{place}, and {entry.value} of {_package(entry)} can't be imported: {type(error).__name__}: "
                f"{error}; repair the package, or uninstall it"
            ) from error
        if not (isinstance(entry_class, type) and issubclass(entry_class, base)):
            raise UserError(f"{place}, and {entry.value} of {_package(entry)} is no subclass of {self.base}; use one")
        return entry_class


ENGINE_PLUGINS = Plugins(group="samestep.engines", key="run.engine", base="samestep.engines.base.Engine")
LOGGER_PLUGINS = Plugins(group="samestep.loggers", key="run.log", base="samestep.loggers.base.Logger")
COMMUNICATION_PLUGINS = Plugins(
    group="samestep.communication",
    key="recipe.communication.kind",
    base="samestep.comm.compression.base.Method",
)


def _package(entry: EntryPoint) -> str:
    """The distribution that declares an entry point, with its version."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "a package"
