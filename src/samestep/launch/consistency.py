"""Facts that must agree on all hosts of a job, and the message if two hosts differ.

The command is compared where the user starts it on every host: one with another learning rate would train wrong
without any error. Hosts exchange 16 bits of its digest: others may read the store, and a command may contain secrets.
Documented under "Who must agree" in docs/launch.md.
"""

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from samestep.launch.node_spec import NodeSpec
from samestep.launch.rank_entry import JOB_FILES, is_file, is_ours
from samestep.version import VERSION

_SOURCES = Path(__file__).parents[1]

_INSTALL, _COPY = "install the same on both", "copy the same file to both"
_REMEDIES = {
    "samestep version": _INSTALL,
    "PyTorch version": _INSTALL,
    "Python version": _INSTALL,
    "samestep sources": _INSTALL,
    "script": _COPY,
    "job file": _COPY,
    "command": "give both the same, and take what is a host's own from its environment",
}
_GIVE = "give both the same"

_SCRIPTS = (".py", ".sh")


def facts_of(spec: NodeSpec) -> dict[str, Any]:
    """Collect this host's facts, in the order in which they are compared; for JSON."""
    facts: dict[str, Any] = {
        "job": spec.job,
        "number of hosts": spec.size,
        "samestep version": VERSION,
        "PyTorch version": str(torch.__version__),
        "Python version": platform.python_version(),
        "samestep sources": digest_of(_SOURCES),
    }
    if not spec.controlled:  # else the controller gives all hosts the same
        facts["engine"] = spec.ranks.engine
        facts["device"] = spec.ranks.device
        facts["command"] = f"SHA-256 {_digest_of_words(spec.command)}"
    if (number := _file(spec.command)) is not None:
        kind, path = "job file" if is_ours(spec.command) else "script", Path(spec.command[number])
        with suppress(OSError):  # a rank will report why it can't be read
            facts[kind] = f"{path.name} of SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    if spec.must_match:
        facts["ranks a host"] = str(spec.num_procs)
    return facts


def difference(theirs: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the first fact in which two hosts differ, with a message; None if they agree.

    Each mapping is from `facts_of`, plus the host's name under "host". Facts that one of them lacks are not compared.
    """
    names = [name for name in own if name != "host" and theirs.get(name, own[name]) != own[name]]
    if not names:
        return None
    name = names[0]
    message = (
        f'the hosts of this job differ in their {name}: {theirs["host"]} has "{theirs[name]}", '
        f'{own["host"]} has "{own[name]}"; {_REMEDIES.get(name, _GIVE)}'
    )
    return name, message


def digest_of(folder: Path) -> str:
    """Hash the names and contents of a package's Python files, relative to its folder."""
    digest = hashlib.sha256()
    # Skip an editor's hidden files.
    files = {
        file.relative_to(folder).as_posix(): file for file in folder.rglob("*.py") if not file.name.startswith(".")
    }
    for name in sorted(files):
        content = hashlib.sha256(files[name].read_bytes()).hexdigest()
        digest.update(f"{content} {name}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()[:12]


def _file(command: Sequence[str]) -> int | None:
    """Return the index of the word that names the script, or a samestep command's job file; None if none does."""
    for number, word in enumerate(command):
        is_meant = word.endswith(JOB_FILES if is_ours(command) else _SCRIPTS) or (number == 0 and _is_text(word))
        if is_meant and is_file(word):
            return number
    return None


def _is_text(program: str) -> bool:
    """Whether a program is a script with a #! line."""
    with suppress(OSError), Path(program).open("rb") as file:
        return file.read(2) == b"#!"
    return False


def _digest_of_words(command: Sequence[str]) -> str:
    """Hash a command's words. The folders of the program and of the script may differ between hosts.

    16 bits: enough to detect a difference, too few to try passwords against.
    """
    file = _file(command)
    words = [(Path(word).name or word) if number in (0, file) else word for number, word in enumerate(command)]
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:4]
