"""The YAML loader of all files that users write: job files, engines' settings, other tools' configuration files.

PyYAML takes the last of several equal keys. Here a key that stands twice is a mistake, named with both of its lines.

YAML 1.1, which PyYAML reads, has numbers that look like something else: 1:30 is 90, and 010 is 8. Here they are a
mistake, with what to write instead; 0x10 and 1_000 are read, as they can mean but one thing.

A text has limits, beyond which PyYAML needs minutes or its recursion ends: characters, values, and sections inside
one another. An alias counts as often as it stands there, and may not stand inside of what it is the name of.
"""

import re
import unicodedata
from collections.abc import Iterator
from typing import Any

import yaml

Keys = tuple[str, ...]

MOST_CHARACTERS = 2**18
MOST_VALUES = 50_000
MOST_DEPTH = 100

MERGE = "tag:yaml.org,2002:merge"  # of the key <<, which may stand several times


class DuplicateKeyError(yaml.MarkedYAMLError):
    """A key stands twice in a section."""

    def __init__(self, keys: Keys, first: yaml.Node, second: yaml.Node) -> None:
        super().__init__(problem=f'key "{".".join(keys)}" stands twice', problem_mark=second.start_mark)
        self.first_line = first.start_mark.line + 1


class RefusedError(yaml.MarkedYAMLError):
    """YAML that is refused here: a number that isn't what it looks like, or a text beyond the limits."""


class YamlLoader(yaml.SafeLoader):
    """Refuses keys that stand twice, and names the line of a value that it can't convert, such as an invalid date."""

    def __init__(self, text: str) -> None:
        if len(text) > MOST_CHARACTERS:
            raise yaml.YAMLError(
                f"it has {len(text):,} characters; {MOST_CHARACTERS:,} are the most that can be read"
            )
        super().__init__(text)
        self._values = 0  # so far; those of an alias again each time it stands there
        self._depth = self._deepest = 0
        self._finished: dict[int, tuple[int, int]] = {}  # node -> the values in it, and how deep they are

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            self._refuse_duplicates(node)
        return node

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()
        if self.check_event(yaml.AliasEvent):
            node = super().compose_node(parent, index)
            if id(node) not in self._finished:
                problem = f"the section of &{event.anchor} contains itself by *{event.anchor}; write it out"
                raise RefusedError(problem=problem, problem_mark=event.start_mark)
            values, depth = self._finished[id(node)]
            self._count(values, self._depth + depth, event.start_mark)
            return node
        values, deepest = self._values, self._deepest
        self._deepest = self._depth
        self._count(1, self._depth + 1, event.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        self._finished[id(node)] = self._values - values, self._deepest - self._depth
        self._deepest = max(deepest, self._deepest)
        return node

    def _count(self, values: int, depth: int, mark: Any) -> None:
        """Add the values of a node. Raises RefusedError where they are too many, or too deep."""
        self._values += values
        self._deepest = max(self._deepest, depth)
        if depth > MOST_DEPTH:
            problem = f"sections are nested more than {MOST_DEPTH} deep; nest them less"
        elif self._values > MOST_VALUES:
            problem = f"more than {MOST_VALUES:,} values up to here, those of an alias each time it stands; use fewer"
        else:
            return
        raise RefusedError(problem=problem, problem_mark=mark)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            return super().construct_object(node, deep)
        kind = node.tag.rpartition(":")[2]
        if kind in ("int", "float"):
            _refuse_misleading(node)
        try:
            value = super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            why = str(error) if isinstance(error, ValueError) and kind == "timestamp" else f"no {kind} of YAML"
            raise yaml.constructor.ConstructorError(
                None, None, f"{_short(node.value)}: {why}", node.start_mark
            ) from None
        if isinstance(value, str) and (wrong := NO_TEXT.search(value)):
            problem = f"character {ord(wrong[0]):#x} can't stand in a text"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return value

    def _refuse_duplicates(self, root: yaml.Node) -> None:
        """Look at each section as it was written: to construct one, PyYAML first puts merged keys into it."""
        open_nodes: list[tuple[Keys, yaml.Node]] = [((), root)]
        seen: set[int] = set()  # an alias is the node that it stands for, and may be inside of that
        while open_nodes:
            path, node = open_nodes.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, yaml.SequenceNode):
                open_nodes += reversed([((*path, str(index)), item) for index, item in enumerate(node.value)])
            elif isinstance(node, yaml.MappingNode):
                open_nodes += reversed([*self._values_once(path, node)])

    def _values_once(self, path: Keys, node: yaml.MappingNode) -> Iterator[tuple[Keys, yaml.Node]]:
        """The values of a section and the keys that lead to them. Raises DuplicateKeyError."""
        first: dict[str, yaml.Node] = {}
        for key, value in node.value:
            if key.tag != MERGE:
                name = str(self.construct_object(key, deep=True))
                if name in first:
                    raise DuplicateKeyError((*path, name), first[name], key)
                first[name] = key
                yield (*path, name), value
            else:
                yield path, value


# Without the type of the single character =, for which PyYAML has no value: it is text.
YamlLoader.yaml_implicit_resolvers = {
    first: [resolver for resolver in resolvers if resolver[0] != "tag:yaml.org,2002:value"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


# NUL, and halves of a pair that stands for one character; escapes such as "\\ud800" write them.
NO_TEXT = re.compile("[\0\ud800-\udfff]")

_OCTAL = re.compile(r"[-+]?0[0-7_]+")
_THOUSANDS = re.compile(r"[-+]?(0x[0-9a-fA-F_]+|0b[01_]+|\d{1,3}(_\d{3})+(\.\d*)?([eE][-+]?\d+)?)")


def _refuse_misleading(node: yaml.ScalarNode) -> None:
    """Raise RefusedError for a number in base 60 or 8, or with underscores elsewhere than between thousands."""
    text, meaning = node.value, None
    if ":" in text:
        sign = -1 if text.startswith("-") else 1
        total = 0.0
        for part in text.lstrip("+-").replace("_", "").split(":"):
            total = total * 60 + float(part or 0)
        meaning = f"{sign * total:.15g}"
    elif _OCTAL.fullmatch(text):
        meaning = str(int(text.replace("_", ""), 8))
    elif "_" in text and not _THOUSANDS.fullmatch(text):
        meaning = text.replace("_", "")
    if meaning is None:
        return
    others = f", {text.replace('_', '').lstrip('+-0')}" if _OCTAL.fullmatch(text) else ""
    meaning = _short(meaning)
    problem = f"{_short(text)} is the number {meaning} in YAML 1.1; write {meaning}{others}, or a text in quotes"
    raise RefusedError(problem=problem, problem_mark=node.start_mark)


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def parse_yaml(text: str) -> Any:
    """The value of a text in YAML. Raises yaml.YAMLError or RecursionError, which `yaml_mistake` explains."""
    return yaml.load(text, YamlLoader)


def yaml_mistake(error: yaml.YAMLError | RecursionError, name: str, text: str, instead: str = "not YAML") -> str:
    """Explain in one line what is wrong in the text of file `name`; `instead` says what the file is not."""
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return f"{name}:{line}: {instead}: character {error.character:#x} can't stand in it"
    if not isinstance(error, yaml.MarkedYAMLError):
        problem = (
            "sections are nested without end" if isinstance(error, RecursionError) else " ".join(str(error).split())
        )
        return f"{name}: {instead}: {problem}"
    place = name if error.problem_mark is None else f"{name}:{error.problem_mark.line + 1}"
    if isinstance(error, RefusedError):
        return f"{place}: {error.problem}"
    if isinstance(error, DuplicateKeyError):
        return f"{place}: {error.problem}, first in {name}:{error.first_line}; keep one of them"
    problem = error.problem or " ".join(str(error).split())
    if problem.startswith("but "):
        problem = f"{error.context}, {problem}"
    lines = [] if error.problem_mark is None else text.splitlines()[: error.problem_mark.line + 1]
    return f"{place}: {instead}: {problem}{_advice(problem, lines, name)}"


# What input methods and word processors write, and YAML takes for letters.
_LOOKALIKES = {
    "：": ":",
    "，": ",",
    "｛": "{",
    "｝": "}",
    "［": "[",
    "］": "]",
    "\u00a0": " ",
    "\u3000": " ",
    "“": '"',
    "”": '"',
}


def _advice(problem: str, lines: list[str], name: str) -> str:
    """What to do about a problem, after "; ", or "". `lines`: of the text, up to that of the problem."""
    if "'\\t'" in problem:
        indents = not lines or "\t" in lines[-1][: len(lines[-1]) - len(lines[-1].lstrip())]
        return "; indent with spaces" if indents else "; put a space in place of the tab"
    if problem.endswith("found another document"):
        return "; keep one, without ---"
    for number in range(len(lines), max(0, len(lines) - 2), -1):  # a key that is none shows in the line after it
        for wrong, right in _LOOKALIKES.items():
            if wrong in lines[number - 1].partition(" #")[0]:
                called = f"{unicodedata.name(wrong).lower()} ({ascii(wrong)[1:-1]})"
                return f"; {name}:{number} has a {called}, which YAML doesn't know; write {right!r}"
    return ""
