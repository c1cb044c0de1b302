"""The YAML loader of all files that users write: job files, engines' settings, other tools' configuration files.

PyYAML takes the last of several equal keys. Here a key that stands twice is a mistake, named with both of its lines.
"""

from collections.abc import Iterator
from typing import Any

import yaml

Keys = tuple[str, ...]

_MERGE = "tag:yaml.org,2002:merge"  # of the key <<, which may stand several times


class DuplicateKeyError(yaml.MarkedYAMLError):
    """A key stands twice in a section."""

    def __init__(self, keys: Keys, first: yaml.Node, second: yaml.Node) -> None:
        super().__init__(problem=f'key "{".".join(keys)}" stands twice', problem_mark=second.start_mark)
        self.first_line = first.start_mark.line + 1


class YamlLoader(yaml.SafeLoader):
    """Refuses keys that stand twice, and names the line of a value that it can't convert, such as an invalid date."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            self._refuse_duplicates(node)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            raise yaml.constructor.ConstructorError(None, None, f"{node.value}: {error}", node.start_mark) from None

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
            if key.tag != _MERGE:
                name = str(self.construct_object(key, deep=True))
                if name in first:
                    raise DuplicateKeyError((*path, name), first[name], key)
                first[name] = key
                yield (*path, name), value
            else:
                yield path, value


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
    if isinstance(error, DuplicateKeyError):
        return f"{place}: {error.problem}, first in {name}:{error.first_line}; keep one of them"
    problem = error.problem or str(error)
    if problem.startswith("but "):
        problem = f"{error.context}, {problem}"
    return f"{place}: {instead}: {problem}" + ("; indent with spaces" if "'\\t'" in problem else "")
