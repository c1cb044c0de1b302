"""The YAML loader of all files that users write: keys that stand twice, and what is none of that."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from samestep.engines import horovod
from samestep.engines.parameter_server import settings
from samestep.errors import UserError
from samestep.yaml_loader import parse_yaml, yaml_mistake

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", 'file:3: key "a" stands twice, first in file:1; keep one of them'),
        ("a:\n  b: {c: 1,\n  c: 1}", 'file:3: key "a.b.c" stands twice, first in file:2; keep one of them'),
        ("- a: 1\n- a: 1\n  a: 2", 'file:3: key "1.a" stands twice, first in file:2; keep one of them'),
        ('1: 2\n"1": 2', 'file:2: key "1" stands twice, first in file:1; keep one of them'),
        ("on: 1\ntrue: 2", 'file:2: key "True" stands twice, first in file:1; keep one of them'),
        ("<<: {a: 1,\n  a: 2}", 'file:2: key "a" stands twice, first in file:1; keep one of them'),
        ("a: [1", "file:1: none: expected ',' or ']', but got '<stream end>'"),
        ("a:\n  b: 2020-99-01", "file:2: none: 2020-99-01: month must be in 1..12"),
        ("a:\n\tb: 1", "file:2: none: found character '\\t' that cannot start any token; indent with spaces"),
        ("a:\n  \x07", "file:2: none: character 0x7 can't stand in it"),
        ("[" * 5000, "file:1: sections are nested more than 100 deep; nest them less"),
    ],
)
def test_a_mistake_is_named_with_its_lines(text: str, message: str) -> None:
    with pytest.raises((yaml.YAMLError, RecursionError)) as raised:
        parse_yaml(text)
    assert yaml_mistake(raised.value, "file", text, "none") == message


@pytest.mark.parametrize(
    "text",
    [
        "a: {x: 1}\nb: {x: 1}\nc: [{x: 1}, {x: 1}]",
        "a: &a {x: 1}\nb: {<<: *a, x: 2}",
        "a: &a {x: 1}\nb: &b {x: 3, y: 4}\nc: {<<: [*a, *b], x: 2}",
        "a: &a {x: 1}\nb: &b {y: 2}\nc:\n  <<: *a\n  <<: *b",
        # The deeper section is constructed after the one that merges it, which has put its merged keys into it.
        "a: &a {x: 1}\nb: {c: {d: &d {<<: *a, x: 2}}}\ne: {<<: *d}",
        "a: &a [1]\nb: *a",
    ],
)
def test_keys_that_are_merged_or_stand_in_other_sections_are_none_that_stand_twice(text: str) -> None:
    expected: Any = yaml.safe_load(text)
    assert parse_yaml(text) == expected


@pytest.mark.parametrize(
    ("read", "text", "key"),
    [
        (settings.read, "servers: 1\nservers: 2\n", "servers"),
        (horovod.read, "messages: gloo\nmessages: gloo\n", "messages"),
    ],
)
def test_engines_settings_have_no_key_twice(read: Callable[[Path], Any], text: str, key: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as raised:
        read(file)
    assert str(raised.value) == f'{file}:2: key "{key}" stands twice, first in {file}:1; keep one of them'
    file.write_text(text.partition("\n")[0], encoding="utf-8")
    assert read(file)
