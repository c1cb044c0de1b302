"""Tables in the terminal: the result of a training, a proof, a rehearsal of a job's ranks, and a profile."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from samestep.bits import BitsRow
from samestep.comm.traffic import KINDS
from samestep.display.console import WIDTH, plain_console
from samestep.fault_tolerance.pace import lagging
from samestep.matrix import Row
from samestep.profiling.breakdown import CATEGORIES, Profile
from samestep.proof import Proof
from samestep.training.evaluation import scalars
from samestep.training.result import TrainResult, is_curve
from samestep.training.usage import Usage

if TYPE_CHECKING:
    from samestep.training.rehearsal import Rehearsal

# Titles and formats of the speeds in a result.
_SPEEDS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "tokens_per_second": ("tokens/s", "{:,.0f}".format),
    "flops_per_second": ("GFLOP/s", lambda flops: f"{flops / 1e9:,.1f}"),
    "measured_peak_flops": ("GFLOP/s of matrix products", lambda flops: f"{flops / 1e9:,.1f}"),
    "model_flops_utilisation": ("model FLOPs utilisation", "{:.1%}".format),
}


def print_result(result: TrainResult, console: Console | None = None) -> None:
    """The classification report where there are classes, then every single number."""
    console = console or plain_console()
    further = {
        "steps": f"{result.steps:,}",
        "final loss": f"{result.losses[-1]:.4f}",
        "seconds": f"{result.seconds:.1f}",
        "samples/s": f"{result.samples_per_second:,.1f}",
        **{name: show(result.speeds[key]) for key, (name, show) in _SPEEDS.items() if key in result.speeds},
    }
    print_metrics(result.metrics, console, further)
    if result.stopped_early is not None:
        console.print(result.stopped_early, soft_wrap=True)
    print_usage(result.usage, console)
    print_slow_ranks(result.own_step_seconds, console)
    console.print(f"files: {result.folder}", soft_wrap=True)  # whole, so that it can be copied


def print_metrics(
    metrics: Mapping[str, Any], console: Console | None = None, further: Mapping[str, str] | None = None
) -> None:
    """Print the classification report if there is one, then every scalar metric and the `further` entries."""
    console = console or plain_console()
    per_class = {name: value for name, value in metrics.items() if _is_per_class(value)}
    if per_class:
        console.print(_class_table(per_class))
    for name, value in metrics.items():
        if isinstance(value, Mapping) and not is_curve(value) and not _is_per_class(value):
            console.print(_matrix_table(name, value))
    numbers = {name.replace("_", " "): f"{value:.4f}" for name, value in scalars(metrics).items()}
    table = Table(show_header=False)
    for name, value in {**numbers, **(further or {})}.items():
        table.add_row(name, value)
    console.print(table)


def print_usage(
    ranks: Sequence[Usage], console: Console | None = None, *, numbers: Sequence[int] | None = None
) -> None:
    """Print what each rank held and sent in a step; of many ranks the least and the most.

    `numbers`: the ranks' numbers, if they are not all ranks.
    """
    if not ranks:
        return
    console = console or plain_console()
    rows = [{**usage.to_json(), **usage.sent} for usage in ranks]
    few = len(ranks) <= _MOST_RANKS
    table = Table(title="bytes of a rank in one step")
    table.add_column("")
    for title in [f"rank {rank}" for rank in numbers or range(len(ranks))] if few else ["least", "most"]:
        table.add_column(title, justify="right")
    for name in (*_HELD, *KINDS):
        counts = [row.get(name, 0) for row in rows]
        if name in _ALWAYS_SHOWN or any(counts):
            shown = counts if few else [min(counts), max(counts)]
            table.add_row(_HELD.get(name, f"sent by {name}"), *map(bytes_shown, shown))
    console.print(table)


def print_slow_ranks(seconds: Sequence[float], console: Console | None = None) -> None:
    """Each rank's seconds a step, where some rank takes clearly longer than most."""
    slow = lagging(seconds)
    if not slow:
        return
    table = Table(title="seconds of a rank in one step, without waiting for others")
    for title in ("rank", "seconds", ""):
        table.add_column(title, justify="right")
    for rank, each in enumerate(seconds):
        if rank in slow or len(seconds) <= _MOST_RANKS:
            table.add_row(str(rank), f"{each:.4f}", "slow" if rank in slow else "")
    (console or plain_console()).print(table)


# Entries of a rank's usage, and their names in a table.
_HELD = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "activations": "peak activations",
    "gathered": "peak gathered",
    "host": "in host memory",
    "disk": "on disk",
}

_ALWAYS_SHOWN = ("parameters", "gradients", "optimizer_state", "activations")

_MOST_RANKS = 4  # that have a column each; of more ranks the least and the most are shown


def bytes_shown(count: float) -> str:
    """Three digits and a unit: 1.23 MB is 1,230,000 bytes."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def print_proof(proof: Proof, console: Console | None = None) -> None:
    """Print the largest relative differences, remarks, and the verdict of a proof."""
    console = console or plain_console()
    table = Table(title=f"{proof.layout} beside one process, {proof.steps} steps in {proof.dtype}")
    table.add_column("largest relative difference of")
    table.add_column("", justify="right")
    for name, value in proof.max_relative_difference.items():
        table.add_row(name.replace("_", " "), f"{value:.2e}")
    console.print(table)
    verdict = "the same step" if proof.same_step else "NOT the same step"
    if proof.nonfinite:
        verdict = f"{proof.nonfinite[0].kind}: {verdict}"
    for words in proof.words():
        console.print(words, soft_wrap=True)
    console.print(f"{verdict} (tolerance {proof.tolerance:.0e}); worst parameter: {proof.worst_parameter}")


def print_matrix(rows: Sequence[Row], console: Console | None = None) -> None:
    """Print a line for every job and layout: the largest differences, or why the layout was refused."""
    console = console or plain_console()
    table = Table(title="largest relative difference from one process, in float64")
    table.add_column("job", overflow="fold")
    table.add_column("layout", overflow="fold")
    for name in _DIFFERENCES:
        table.add_column(name.replace("_", " "), justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("s", justify="right", no_wrap=True)
    for row in rows:
        differences = row.proof.max_relative_difference if row.proof else {}
        numbers = [f"{differences[name]:.1e}" if name in differences else "" for name in _DIFFERENCES]
        table.add_row(
            row.job, row.layout, *numbers, row.verdict, f"{row.seconds:.1f}" if row.seconds is not None else ""
        )
    console.print(table)
    for row in rows:
        for words in row.words:
            console.print(f"{row.verdict}: {row.job}: {words}", soft_wrap=True)
    counts = Counter(row.verdict for row in rows)
    console.print(", ".join(f"{verdict}: {count}" for verdict, count in counts.items()))


def print_bits(rows: Sequence[BitsRow], console: Console | None = None) -> None:
    """A line for every layout: what has other bits than one process, and how long ordered and fast steps take."""
    console = console or plain_console()
    table = Table(title="bits beside one process, run.reduction: ordered")
    table.add_column("layout", overflow="fold")
    for name in ("", "ordered s", "fast s", "ordered / fast"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        times = [f"{each:.4f}" if each is not None else "" for each in (row.ordered_seconds, row.fast_seconds)]
        table.add_row(row.layout, row.verdict, *times, f"{row.cost:.1f}" if row.cost is not None else "")
    console.print(table)
    for row in rows:
        if told := row.reason or row.failure:
            console.print(f"{row.verdict}: {told}", soft_wrap=True)
        for name, places in row.differs.items():
            if places:
                more = f" and {len(places) - 3} more" if len(places) > 3 else ""
                console.print(f"{row.layout}: {name}: {', '.join(places[:3])}{more}", soft_wrap=True)
    compared = next((row for row in rows if row.differs), None)
    if compared is not None:
        what = ", ".join(compared.differs)
        told = f"compared after {compared.steps} steps: {what}; seconds are of one step, the median"
        console.print(told, soft_wrap=True)


_DIFFERENCES = ("loss", "grad_norm", "parameters", "metrics")


def _is_per_class(value: Any) -> bool:
    """Whether a metric is a number for each class, such as precision by class."""
    return isinstance(value, Mapping) and all(isinstance(number, (int, float)) for number in value.values())


def print_rehearsals(ranks: "Sequence[Rehearsal]", console: Console | None = None) -> None:
    """Print what the rehearsed ranks held and sent, then the collectives of the rank that sends most."""
    console = console or plain_console()
    print_usage([each.usage for each in ranks], console, numbers=[each.rank for each in ranks])
    most = max(ranks, key=lambda each: each.usage.sent_in_all)
    if not most.collectives:
        return
    table = Table(title=f"messages of rank {most.rank} in one step")
    table.add_column("collective")
    table.add_column("axis")
    for title in ("ranks", "count", "sent"):
        table.add_column(title, justify="right")
    for each in most.collectives:
        table.add_row(each.kind, each.axis, str(each.ranks), f"{each.count:,}", bytes_shown(each.sent))
    console.print(table)


def _class_table(metrics: Mapping[str, Mapping[str, float]]) -> Table:
    """The classification report: a row for each class, a column for each metric."""
    table = Table(title="held-out samples by class")
    table.add_column("class")
    for name in metrics:
        table.add_column(name, justify="right")
    for label in next(iter(metrics.values())):
        numbers = [values[label] for values in metrics.values()]
        table.add_row(label, *(f"{n:,}" if isinstance(n, int) else f"{n:.3f}" for n in numbers))
    return table


def _matrix_table(name: str, rows: Mapping[str, Sequence[Any]]) -> Table:
    """A confusion matrix: a row for each true class, a column for each predicted one."""
    table = Table(title=f"{name.replace('_', ' ')} (rows: true, columns: predicted)")
    table.add_column("")
    for label in rows:
        table.add_column(label, justify="right")
    for label, numbers in rows.items():
        table.add_row(label, *map(str, numbers))
    return table


_MOST_PROFILED = 16  # ranks that a profile shows

# How the straggler spends the phase that delays the others.
_STRAGGLER_KINDS = {"busy": "where it works", "idle": "where it is idle"}


def print_profile(profile: Profile, console: Console | None = None) -> None:
    """Print the parts of a step's time for each rank, the straggler, and the folder of the traces."""
    console = console or plain_console(width=WIDTH)
    first, last = profile.steps[0], profile.steps[-1]
    table = Table(
        title=f"{profile.layout}: where a step's time goes, ms and share, mean of steps {first} to {last}",
        caption="they add up to the step, but what is overlapped: messages beside which the rank worked",
    )
    for title in ("rank", "step", *CATEGORIES, "overlapped"):
        table.add_column(title, justify="right", no_wrap=True)
    for rank in profile.ranks[:_MOST_PROFILED]:
        cells = [
            f"{rank.categories[name] * 1e3:.1f} {rank.categories[name] / rank.seconds:4.0%}" for name in CATEGORIES
        ]
        table.add_row(str(rank.rank), f"{rank.seconds * 1e3:.1f}", *cells, f"{rank.overlapped * 1e3:.1f}")
    console.print(table)
    if len(profile.ranks) > _MOST_PROFILED:
        console.print(f"{len(profile.ranks) - _MOST_RANKS} more ranks stand in profile.json")
    if profile.straggler is not None:
        late = profile.straggler
        console.print(
            f"straggler: rank {late.rank}: {late.own_seconds * 1e3:.1f} ms a step by itself, the others "
            f"{late.others_seconds * 1e3:.1f} ms; most of it in {late.phase}, {_STRAGGLER_KINDS[late.kind]}",
            soft_wrap=True,
        )
    if profile.usual_seconds is not None:
        console.print(f"steps without the profiler: {profile.usual_seconds * 1e3:.1f} ms", soft_wrap=True)
    console.print(f"profile: {profile.folder}", soft_wrap=True)
