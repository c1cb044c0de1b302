"""Variables: which of this process's environment go to the hosts of a job. Never a secret, unless it is asked for."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from samestep.errors import UserError
from samestep.input_files import text_of

# Prefixes of variables that training libraries read.
PREFIXES = ("NCCL_", "PYTHON", "SAMESTEP_", "OMP_", "GLOO_", "TORCH", "CUDA_")

# Variables with these prefixes that belong to one process or one host.
_OWN = re.compile(
    r"TORCHELASTIC_.*|CUDA_VISIBLE_DEVICES|SAMESTEP_(?:ENV_FILE|SHARED_OUT|MEMORY_FOLDER|(?:RUN|ROUND)(?:_FOLDER)?)"
)

# Parts of names of secrets, which stay on this host. KEY must be a whole word: NCCL_IB_PKEY is none.
_SECRET = re.compile(
    r"TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|APIKEY|(?:^|_)(?:KEYS?|AUTH|COOKIES?|PRIVATE|PASS)(?:_|$)|^AWS_",
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
    environ: Mapping[str, str], *, asked: Sequence[str] = (), files: Sequence[Path] = ()
) -> ForwardedVariables:
    """Gather the variables for every host: by prefix, from files (the first one wins), and those requested.

    Raises UserError for a file that can't be read, and for a requested variable that isn't set.
    """
    values: dict[str, str] = {}
    sources: dict[str, str] = {}
    for name, value in environ.items():
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
        if prefix is not None and not _OWN.fullmatch(name) and not is_secret(name):
            values[name], sources[name] = value, f"here, by {prefix}*"
    for file in reversed(files):
        for name, value in read_file(file):
            values[name], sources[name] = value, str(file)
    for name in asked:
        if not _NAME.fullmatch(name):
            raise UserError(f'--pass "{name}" is no name of a variable; its value is taken from the environment')
        if name not in environ:
            raise UserError(f"--pass {name}: it is not set here; export it, or leave --pass {name} out")
        values[name], sources[name] = environ[name], "here, by --pass"
    kept_back = tuple(sorted(name for name in environ if is_secret(name) and name not in values))
    return ForwardedVariables(values=values, sources=sources, kept_back=kept_back)


def files_of(named: str | None, folder: Path, home: Path) -> list[Path]:
    """List the existing variable files, nearest first: the `named` one, the folder's, the home's.

    Raises UserError if the named one doesn't exist.
    """
    if named is not None and not Path(named).is_file():
        raise UserError(f"SAMESTEP_ENV_FILE={named}: there is no such file")
    candidates = [*([Path(named)] if named is not None else []), folder / _FILE, home / _FILE]
    return list(dict.fromkeys(file for file in candidates if file.is_file()))


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
