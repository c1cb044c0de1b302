"""Facts that must agree on all hosts of a job, and the message if two hosts differ.

Hosts exchange them through a store that others may read, so secrets in a command are masked.

The command is compared where the user starts it on every host: one with another learning rate would train wrong
without any error. The message names the words that differ (documented under "Who must agree" in
docs/launch.md).
"""

import hashlib
import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from samestep import __version__
from samestep.launch.forwarded_env import is_secret
from samestep.launch.node_spec import NodeSpec
from samestep.launch.rank_entry import JOB_FILES, is_file, is_ours

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

# A name followed by its value in the same word: --token=x, run.token=x, {"token": x}, -c "train --token x".
_NAMED = re.compile(r"([\w.-]+)[\"']?[=:\s]")
_LOGIN = re.compile(r"//[^/@\s]+@")  # of an address such as postgres://user:password@host
_HIDDEN = "***"

_SHOWN = 48  # characters of a word
_BEFORE = 12  # of them, before the first that differs


def told(part: NodeSpec) -> dict[str, Any]:
    """Collect this host's facts, in the order in which they are compared; for JSON."""
    found: dict[str, Any] = {
        "job": part.job,
        "number of hosts": part.size,
        "samestep version": __version__,
        "PyTorch version": str(torch.__version__),
        "Python version": platform.python_version(),
        "samestep sources": digest_of(_SOURCES),
    }
    if not part.controlled:  # else the controller gives all hosts the same
        found["engine"] = part.ranks.engine
        found["device"] = part.ranks.device
        found["command"] = _told_words(part.command)
    if (number := _file(part.command)) is not None:
        kind, path = "job file" if is_ours(part.command) else "script", Path(part.command[number])
        with suppress(OSError):  # a rank will report why it can't be read
            found[kind] = f"{path.name} of SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    if part.must_match:
        found["ranks a host"] = str(part.num_procs)
    return found


def difference(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the first fact in which two hosts differ, with a message; None if they agree.

    Each mapping is from `told`, plus the host's name under "host". Facts that one of them lacks are not compared.
    """
    names = [name for name in mine if name != "host" and theirs.get(name, mine[name]) != mine[name]]
    if not names:
        return None
    name = names[0]
    first, second = str(theirs[name]), str(mine[name])
    if name == "command":
        first, second = _apart(theirs[name], mine[name])
    message = (
        f"the hosts of this job differ in their {name}: {theirs['host']} has {_quoted(first)}, "
        f"{mine['host']} has {_quoted(second)}{' (what looks secret is hidden)' if first == second else ''}; "
        f"{_REMEDIES.get(name, _GIVE)}"
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


def _told_words(command: Sequence[str]) -> list[list[str]]:
    """Mask the secrets in a command; return each word, with a short digest if it was masked.

    The digest has 16 bits: enough to detect a difference, too few to reveal the secret.
    """
    file = _file(command)
    found = []
    after_a_secrets_name = False
    for number, word in enumerate(command):
        if number in (0, file):
            # Its folder may differ between hosts.
            found.append([Path(word).name or word, ""])
            continue
        secret = after_a_secrets_name and not word.startswith("--")
        shown = _HIDDEN if secret else _without_secrets(word)
        found.append([shown, "" if shown == word else _mark(word)])
        after_a_secrets_name = word.startswith("-") and _is_secret(word)
    return found


def _mark(word: str) -> str:
    return hashlib.sha256(word.encode(errors="surrogateescape")).hexdigest()[:4]


def _without_secrets(word: str) -> str:
    """Mask the value of a name that looks secret, or the login in an address."""
    named = next((match for match in _NAMED.finditer(word) if _is_secret(match[1])), None)
    return word[: named.end()] + _HIDDEN if named is not None else _LOGIN.sub(f"//{_HIDDEN}@", word)


def _is_secret(option: str) -> bool:
    """Whether an option or a dotted key is named like a secret."""
    return "=" not in option and is_secret(re.sub(r"[-.]", "_", option.lstrip("-")))


def _apart(first: Sequence[Sequence[str]], second: Sequence[Sequence[str]]) -> tuple[str, str]:
    """Return the first words in which two commands differ, shortened, with the option before them."""
    pairs = enumerate(zip(first, second, strict=False))
    at = next((number for number, (one, other) in pairs if one != other), min(len(first), len(second)))
    words = [shown[at][0] if at < len(shown) else "" for shown in (first, second)]
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*words, strict=False)))
    option = first[at - 1][0] if at > 0 else ""
    before = f"{_short(option, 0)} " if option.startswith("-") and "=" not in option else ""
    one, other = (f"{before}{_short(word, same)}".strip() for word in words)
    return one, other


def _short(word: str, same: int) -> str:
    """Shorten a long word to the part around the first differing character."""
    if len(word) <= _SHOWN:
        return word
    start = min(max(0, same - _BEFORE), len(word) - _SHOWN)
    end = start + _SHOWN
    return f"{'...' if start else ''}{word[start:end]}{'...' if end < len(word) else ''}"


def _quoted(text: str) -> str:
    return f'"{" ".join(text.split())}"' if text else "nothing there"
