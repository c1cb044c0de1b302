"""All entries of the table, by name, in its order."""

from functools import cache
from importlib import import_module

from model_table.entry import Entry
from model_table.second_look import MARK, varied

_FILES = ("decoders", "encoders", "vision", "own_sequences", "own_images", "own_others", "random_types", "libraries")


@cache
def entries() -> dict[str, Entry]:
    found = [entry for file in _FILES for entry in import_module(f"model_table.{file}").entries()]
    return {entry.name: entry for entry in found}


def entry_of(name: str) -> Entry:
    """The entry of a name, or the variant of one that `second_look` names."""
    model, mark, variant = name.partition(MARK)
    return varied(entries()[model], variant) if mark else entries()[model]
