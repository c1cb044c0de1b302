"""Tables of proofs in the terminal: one layout's, those of many layouts and jobs, and of bits."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Console

from samestep.display.tables import formatted, numbers, plain_console, table, texts
from samestep.verification.bits import BitsRow
from samestep.verification.matrix import MatrixRow
from samestep.verification.proof import Proof

_DIFFERENCES = ("loss", "grad_norm", "parameters", "metrics")


def print_proof(proof: Proof, console: Console | None = None) -> None:
    """Print the verdict of a proof, the largest relative differences, and remarks."""
    console = console or plain_console()
    console.print(_sentence(proof), soft_wrap=True)
    if proof.departure is not None:
        console.print(f"first difference: {proof.departure.line}", soft_wrap=True)
    rows = [[name.replace("_", " "), f"{value:.2e}"] for name, value in proof.max_relative_difference.items()]
    title = f"{proof.layout} versus one process, {proof.steps} steps in {proof.dtype}"
    console.print(table([*texts("largest relative difference of"), *numbers("")], rows, title=title))
    for words in proof.words():
        console.print(words, soft_wrap=True)
    console.print(f"tolerance {proof.tolerance:.0e}; worst parameter: {proof.worst_parameter}", soft_wrap=True)


def _sentence(proof: Proof) -> str:
    """The verdict on a layout in a sentence."""
    kind = f"{proof.nonfinite[0].kind}: " if proof.nonfinite else ""
    sentences = {
        "the same step": "takes the same step as one process",
        "NOT the same step": "does NOT take the same step as one process",
    }
    sentence = sentences.get(proof.verdict, f"compared with one process: {proof.verdict}")
    return f"{kind}{proof.layout} {sentence}"


def print_matrix(rows: Sequence[MatrixRow], console: Console | None = None) -> None:
    """Print a line for every job and layout: the largest differences, or why the layout was refused."""
    console = console or plain_console()
    columns = [
        *texts("job", "layout"),
        *numbers(*(name.replace("_", " ") for name in _DIFFERENCES), whole=True),
        *texts("", whole=True),
        *numbers("s", whole=True),
    ]
    cells = []
    for row in rows:
        differences = row.proof.max_relative_difference if row.proof else {}
        shown = [f"{differences[name]:.1e}" if name in differences else "" for name in _DIFFERENCES]
        cells.append([row.job, row.layout, *shown, row.verdict, formatted(row.seconds, "{:.1f}")])
    console.print(table(columns, cells, title="largest relative difference from one process, in float64"))
    for row in rows:
        for words in row.words:
            console.print(f"{row.verdict}: {row.job}: {words}", soft_wrap=True)
    counts = Counter(row.verdict for row in rows)
    console.print(", ".join(f"{verdict}: {count}" for verdict, count in counts.items()), soft_wrap=True)


def print_bits(rows: Sequence[BitsRow], console: Console | None = None) -> None:
    """A line for every layout: what has other bits than one process, and how long ordered and fast steps take."""
    console = console or plain_console()
    columns = [*texts("layout"), *numbers("", "ordered s", "fast s", "ordered / fast", whole=True)]
    cells = []
    for row in rows:
        times = [formatted(seconds, "{:.4f}") for seconds in (row.ordered_seconds, row.fast_seconds)]
        cells.append([row.layout, row.verdict, *times, formatted(row.cost, "{:.1f}")])
    console.print(table(columns, cells, title="bits versus one process, run.reduction: ordered"))
    for row in rows:
        if why := row.reason or row.failure:
            console.print(f"{row.verdict}: {why}", soft_wrap=True)
        for name, places in row.differs.items():
            if places:
                more = f" and {len(places) - 3} more" if len(places) > 3 else ""
                console.print(f"{row.layout}: {name}: {', '.join(places[:3])}{more}", soft_wrap=True)
    compared = next((row for row in rows if row.differs), None)
    if compared is not None:
        what = ", ".join(compared.differs)
        compared_text = f"compared after {compared.steps} steps: {what}; seconds are of one step, the median"
        console.print(compared_text, soft_wrap=True)
