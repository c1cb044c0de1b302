"""What the hosts of a job must have in common: what each tells of itself, and the message where two differ.

Hosts tell it through a store that others may read: no secret of a command stands in it.
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

# A name and what follows it in the same word: --token=x, run.token=x, {"token": x}, -c "train --token x".
_NAMED = re.compile(r"([\w.-]+)[\"']?[=:\s]")
_LOGIN = re.compile(r"//[^/@\s]+@")  # of an address such as postgres://user:password@host
_HIDDEN = "***"

_SHOWN = 48  # characters of a word
_BEFORE = 12  # of them, before the first that differs


def told(part: NodeSpec) -> dict[str, Any]:
    """What must be the same on every host, as this one has it, in the order in which it is compared; for JSON."""
    found: dict[str, Any] = {
        "job": part.job,
        "number of hosts": part.size,
        "samestep version": __version__,
        "PyTorch version": str(torch.__version__),
        "Python version": platform.python_version(),
        "samestep sources": digest_of(_SOURCES),
    }
    if not part.controlled:  # who brings the hosts up gives them all the same
        found["engine"] = part.engine
        found["device"] = part.device
        found["command"] = _told_words(part.command)
    if (number := _file(part.command)) is not None:
        kind, path = "job file" if is_ours(part.command) else "script", Path(part.command[number])
        with suppress(OSError):  # a rank will say why it can't be read
            found[kind] = f"{path.name} of SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    if part.alike:
        found["ranks a host"] = str(part.num_procs)
    return found


def difference(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> tuple[str, str] | None:
    """What two hosts differ in first, and a message about it; None where they agree.

    Each is what `told` gave, with the name of its host under "host". What one of them doesn't tell is not compared.
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
    """A digest of the Python files of a package: of their contents and their places in it, not of its own place."""
    digest = hashlib.sha256()
    # Hidden ones are an editor's.
    files = {
        file.relative_to(folder).as_posix(): file for file in folder.rglob("*.py") if not file.name.startswith(".")
    }
    for name in sorted(files):
        content = hashlib.sha256(files[name].read_bytes()).hexdigest()
        digest.update(f"{content} {name}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()[:12]


def _file(command: Sequence[str]) -> int | None:
    """Which word names the script that is run, or the job file of samestep's own commands; None where none does."""
    for number, word in enumerate(command):
        is_meant = word.endswith(JOB_FILES if is_ours(command) else _SCRIPTS) or (number == 0 and _is_text(word))
        if is_meant and is_file(word):
            return number
    return None


def _is_text(program: str) -> bool:
    """Whether a program is a text that an interpreter reads."""
    with suppress(OSError), Path(program).open("rb") as file:
        return file.read(2) == b"#!"
    return False


def _told_words(command: Sequence[str]) -> list[list[str]]:
    """Each word of a command as anybody may read it, and behind one that hides a secret a mark.

    The mark is 16 bits of a digest: enough to see that two hosts differ, too little to find the secret by it.
    """
    file = _file(command)
    found = []
    after_a_secrets_name = False
    for number, word in enumerate(command):
        if number in (0, file):
            # Where it is on a host is the host's own.
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
    """A word of a command as messages show it: values of what is named like a secret are left out."""
    named = next((match for match in _NAMED.finditer(word) if _is_secret(match[1])), None)
    return word[: named.end()] + _HIDDEN if named is not None else _LOGIN.sub(f"//{_HIDDEN}@", word)


def _is_secret(option: str) -> bool:
    """Whether an option's name, or a dotted key, is that of a secret."""
    return "=" not in option and is_secret(re.sub(r"[-.]", "_", option.lstrip("-")))


def _apart(first: Sequence[Sequence[str]], second: Sequence[Sequence[str]]) -> tuple[str, str]:
    """Where two commands differ: the first such word of each, shortened, behind the option that it belongs to."""
    pairs = enumerate(zip(first, second, strict=False))
    at = next((number for number, (one, other) in pairs if one != other), min(len(first), len(second)))
    words = [shown[at][0] if at < len(shown) else "" for shown in (first, second)]
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*words, strict=False)))
    option = first[at - 1][0] if at > 0 else ""
    before = f"{_short(option, 0)} " if option.startswith("-") and "=" not in option else ""
    one, other = (f"{before}{_short(word, same)}".strip() for word in words)
    return one, other


def _short(word: str, same: int) -> str:
    """A word, or what of a long one stands around the first character that differs."""
    if len(word) <= _SHOWN:
        return word
    start = min(max(0, same - _BEFORE), len(word) - _SHOWN)
    end = start + _SHOWN
    return f"{'...' if start else ''}{word[start:end]}{'...' if end < len(word) else ''}"


def _quoted(text: str) -> str:
    return f'"{" ".join(text.split())}"' if text else "nothing there"
