"""Variables: which of this process's environment go to the hosts of a job. Never a secret, unless it is asked for."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from samestep import private_folders
from samestep.errors import UserError
from samestep.input_files import text_of
from samestep.launch.forwarded_names import FAMILIES, NAMES

# Variables that are named as those of libraries and belong to one process, one host, or a container's image.
_OWN = re.compile(
    r"TORCHELASTIC_.*|CUDA_VISIBLE_DEVICES|CUDA_MPS_.*|\w+_VERSION|PYTHON_(?:SHA256|GET_PIP_\w+)"
    r"|SAMESTEP_(?:ENV_FILE|SHARED_OUT|START|MEMORY_FOLDER|ERROR_FILE|BAR_\w+|TEST|(?:RUN|ROUND)(?:_FOLDER)?)"
)

# Parts of names of secrets, which stay on this host. KEY must be a whole word: NCCL_IB_PKEY is none.
_SECRET = re.compile(
    r"TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|APIKEY|WEBHOOK|_PWD(?:_|$)|^AWS_"
    r"|(?:^|_)(?:KEYS?|AUTH|COOKIES?|PRIVATE|PASS|DSN|JWT|BEARER)(?:_|$)",
    re.IGNORECASE,
)

_FILE = ".samestep_env"
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class ForwardedVariables:
    """Environment variables for the hosts of a job, and where each comes from."""

    values: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    kept_back: tuple[str, ...] = ()  # names of secrets that are not forwarded
    unknown: tuple[str, ...] = ()  # others that are named as those of libraries, and not forwarded

    def shown(self) -> list[tuple[str, str, str]]:
        """Return name, value and source of each variable; values of secrets are masked."""
        return [
            (name, "***" if is_secret(name) else self.values[name], self.sources[name])
            for name in sorted(self.values)
        ]


def is_secret(name: str) -> bool:
    """Whether a variable is named like a secret."""
    return _SECRET.search(name) is not None


def gather(
    environ: Mapping[str, str], *, passed: Sequence[str] = (), files: Sequence[Path] = ()
) -> ForwardedVariables:
    """Gather the variables for every host: known ones, from files (the first one wins), and those requested.

    Raises UserError for a file that can't be read, and for a requested variable that isn't set.
    """
    values: dict[str, str] = {}
    sources: dict[str, str] = {}
    for library, names in NAMES.items():
        for name in names:
            if name in environ:
                values[name], sources[name] = environ[name], f"here, known of {library}"
    for file in reversed(files):
        for name, value in read_file(file):
            values[name], sources[name] = value, str(file)
    for name in passed:
        if not _NAME.fullmatch(name):
            raise UserError(f'--pass "{name}" is no name of a variable; its value is taken from the environment')
        if name not in environ:
            raise UserError(f"--pass {name}: it is not set here; export it, or leave --pass {name} out")
        values[name], sources[name] = environ[name], "here, by --pass"
    kept_back = tuple(sorted(name for name in environ if is_secret(name) and name not in values))
    unknown = tuple(
        sorted(
            name
            for name in environ
            if name.startswith(FAMILIES) and not (name in values or is_secret(name) or _OWN.fullmatch(name))
        )
    )
    return ForwardedVariables(values=values, sources=sources, kept_back=kept_back, unknown=unknown)


def files_of(named: str | None, folder: Path, home: Path) -> list[Path]:
    """List the existing variable files, nearest first: the `named` one, the folder's, the home's.

    One that is not named, and that another user could have written, is left out, which is told. Raises UserError if
    the named one doesn't exist.
    """
    if named is not None and not Path(named).is_file():
        raise UserError(f"SAMESTEP_ENV_FILE={named}: there is no such file")
    usual = [file for file in (folder / _FILE, home / _FILE) if file.is_file() and _is_trusted(file)]
    return list(dict.fromkeys([*([Path(named)] if named is not None else []), *usual]))


def _is_trusted(file: Path) -> bool:
    """Whether no other user could have written a file of variables, by which a program is told what to load."""
    try:
        private_folders.check(file)
    except (private_folders.NotPrivateError, OSError) as error:
        why = private_folders.explained(error, f"SAMESTEP_ENV_FILE={file} has it read")
        private_folders.tell(f"{file} is not read, since it decides what the hosts run: {why}")
        return False
    return True


def read_file(file: Path) -> Iterator[tuple[str, str]]:
    """Read a file with a VAR=VAL in each line; quotes around a value are removed. Raises UserError."""
    for number, line in enumerate(text_of(file).splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not _NAME.fullmatch(name):
            raise UserError(f"{file}, line {number}: a line such as NCCL_DEBUG=INFO is wanted")
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        yield name, value
