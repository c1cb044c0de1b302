"""The contents of the files and folders that a recipe names, as one hash, whatever folder they lie in.

Small ones count whole. Of a large file evenly spaced blocks count, and of a large folder the names and sizes of its
files, so that a look takes about a second. Whether a training's samples are those of before is told by
`fingerprint`; these hashes name the source that has changed.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from samestep.data.package_files import locate
from samestep.errors import UserError

_WHOLE = 1 << 26  # bytes of a file that counts whole
_BLOCKS, _BLOCK = 64, 1 << 18  # of a larger one
_WHOLE_FOLDER = 1 << 28  # bytes of a folder whose files count by their contents
_MOST_FILES = 10_000


def sources_of(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The hash of each file or folder that a value names; by its key, such as data.source.

    `sections`: the keys and values below each of these names. Only what can be read is among them.
    """
    digests: dict[str, str] = {}
    for section, values in sections.items():
        for key, value in values.items():
            # As in job files: a word without a dot or a slash is a name.
            if isinstance(value, (str, Path)) and re.search(r"[./]", str(value)):
                digest = digest_of(str(value))
                if digest is not None:
                    digests[f"{section}.{key}"] = digest
    return digests


def digest_of(text: str) -> str | None:
    """The hash of a file's or a folder's contents; None where there is none, or it can't be read."""
    try:
        path = locate(text, "recipe")
        if path.is_file():
            return hashlib.sha256(_content(path)).hexdigest()[:32]
        return _of_folder(path) if path.is_dir() else None
    except (OSError, ValueError, UserError):
        return None


def _content(file: Path) -> bytes:
    """The bytes of a file, or the size and evenly spaced blocks of a large one."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= _WHOLE:
            return stream.read()
        blocks = [str(size).encode()]
        for number in range(_BLOCKS):
            stream.seek(number * (size - _BLOCK) // (_BLOCKS - 1))
            blocks.append(stream.read(_BLOCK))
        return b"".join(blocks)


def _of_folder(folder: Path) -> str | None:
    """The hash of the names and contents of a folder's files; None where they are too many."""
    files: list[tuple[str, Path, int]] = []
    for file in _files_in(folder):
        files.append((file.relative_to(folder).as_posix(), file, file.stat().st_size))
        if len(files) > _MOST_FILES:
            return None
    content = hashlib.sha256()
    by_contents = sum(size for _, _, size in files) <= _WHOLE_FOLDER
    for name, file, size in sorted(files):
        content.update(f"{name}\0{size}\0".encode("utf-8", "surrogateescape"))
        if by_contents:
            content.update(_content(file))
    return content.hexdigest()[:32]


def _files_in(folder: Path) -> Iterator[Path]:
    """The plain files in a folder and its folders, without hidden ones."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            file = Path(place, name)
            if not name.startswith(".") and file.is_file():
                yield file
