"""One-line descriptions of Debian's packages, with the archive's section as the label."""

import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator

from samestep.data.text import LabelledTexts, known_suffixes, once_each
from samestep.errors import UserError

_SECTIONS = 20  # the most frequent ones


def read() -> LabelledTexts:
    """Read the descriptions that apt knows, each once, of the 20 most frequent sections.

    They are those of the machine's own package lists: hosts of one job must have the same lists.
    Raises UserError where apt-cache or its package lists are missing.
    """
    labels = once_each(_descriptions(_dump()))
    if not labels:
        raise UserError('source "debian-packages": apt-cache knows no packages; run apt-get update')
    counts = Counter(labels.values())
    frequent = {section for section, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_SECTIONS]}
    kept = {text: section for text, section in labels.items() if section in frequent}
    return LabelledTexts(
        origin="debian-packages", texts=list(kept), labels=list(kept.values()), names=tuple(sorted(frequent))
    )


def _dump() -> str:
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
