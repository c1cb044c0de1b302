"""Tables of trainings in the terminal: metrics, what ranks held and sent, a rehearsal of ranks, and a profile."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from samestep.comm.traffic import KINDS
from samestep.display.tables import WIDTH, Table, numbers, plain_console, table, texts, values_table
from samestep.fault_tolerance.pace import lagging
from samestep.profiling.breakdown import CATEGORIES, Profile
from samestep.sizes import decimal_size
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


def print_result(
    result: TrainResult, console: Console | None = None, *, details: bool = False, next_command: str | None = None
) -> None:
    """The classification report where there are classes, every single number, and what to do next.

    `details`: also confusion matrices, and the bytes that each rank held and sent.
    """
    console = console or plain_console()
    further = {
        "steps": f"{result.steps:,}",
        **_first_and_last_loss(result),
        "seconds": f"{result.seconds:.1f}",
        "samples/s": f"{result.samples_per_second:,.1f}",
        **{name: show(result.speeds[key]) for key, (name, show) in _SPEEDS.items() if key in result.speeds},
    }
    print_metrics(result.metrics, console, further, matrices=details)
    if result.stopped_early is not None:
        console.print(result.stopped_early, soft_wrap=True)
    if details:
        print_usage(result.usage, console)
    print_slow_ranks(result.own_step_seconds, console)
    console.print(f"files: {result.folder}", soft_wrap=True)  # whole, so that it can be copied
    left_out = [name.replace("_", " ") for name, value in result.metrics.items() if _is_matrix(value)]
    left_out += ["bytes of each rank"] if result.usage else []
    if left_out and not details:
        console.print(f"report.json has more: {', '.join(left_out)} (--details prints them)", soft_wrap=True)
    if next_command is not None:
        console.print(f"next: {next_command}", soft_wrap=True)


def _first_and_last_loss(result: TrainResult) -> dict[str, str]:
    """The losses of the first and the last step that are known; none of a training with no step left to take."""
    if not result.losses:
        return {}
    first = result.steps - len(result.losses) + 1
    name = "loss at start" if first == 1 else f"loss at step {first:,}"  # of a resumed one
    return {name: f"{result.losses[0]:.4f}", "loss at end": f"{result.losses[-1]:.4f}"}


def print_metrics(
    metrics: Mapping[str, Any],
    console: Console | None = None,
    further: Mapping[str, str] | None = None,
    *,
    matrices: bool = True,
) -> None:
    """Print the classification report if there is one, then every scalar metric and the `further` entries."""
    console = console or plain_console()
    per_class = {name: value for name, value in metrics.items() if _is_per_class(value)}
    if per_class:
        console.print(_class_table(per_class))
    for name, value in metrics.items():
        if matrices and _is_matrix(value):
            console.print(_matrix_table(name, value))
    single = {name.replace("_", " "): f"{value:.4f}" for name, value in scalars(metrics).items()}
    console.print(values_table({**single, **(further or {})}))


def print_usage(
    ranks: Sequence[Usage], console: Console | None = None, *, rank_numbers: Sequence[int] | None = None
) -> None:
    """Print what each rank held and sent in a step; of many ranks the least and the most.

    `rank_numbers`: the ranks' numbers, if they are not all ranks.
    """
    if not ranks:
        return
    console = console or plain_console()
    usages = [{**usage.to_json(), **usage.sent} for usage in ranks]
    few = len(ranks) <= _MOST_RANKS
    titles = [f"rank {rank}" for rank in rank_numbers or range(len(ranks))] if few else ["least", "most"]
    rows = []
    for name in (*_HELD, *KINDS):
        counts = [usage.get(name, 0) for usage in usages]
        if name in _ALWAYS_SHOWN or any(counts):
            shown = counts if few else [min(counts), max(counts)]
            rows.append([_HELD.get(name, f"sent by {name}"), *map(decimal_size, shown)])
    console.print(table([*texts(""), *numbers(*titles)], rows, title="bytes of a rank in one step"))


def print_slow_ranks(seconds: Sequence[float], console: Console | None = None) -> None:
    """Each rank's seconds a step, where some rank takes clearly longer than most."""
    slow = lagging(seconds)
    if not slow:
        return
    rows = [
        [str(rank), f"{own_seconds:.4f}", "slow" if rank in slow else ""]
        for rank, own_seconds in enumerate(seconds)
        if rank in slow or len(seconds) <= _MOST_RANKS
    ]
    title = "seconds of a rank in one step, without waiting for others"
    (console or plain_console()).print(table(numbers("rank", "seconds", ""), rows, title=title))


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


def _is_per_class(value: Any) -> bool:
    """Whether a metric is a number for each class, such as precision by class."""
    return isinstance(value, Mapping) and all(isinstance(number, (int, float)) for number in value.values())


def _is_matrix(value: Any) -> bool:
    """Whether a metric has a row for each class, such as a confusion matrix."""
    return isinstance(value, Mapping) and not is_curve(value) and not _is_per_class(value)


def print_rehearsals(ranks: "Sequence[Rehearsal]", console: Console | None = None) -> None:
    """Print what the rehearsed ranks held and sent, then the collectives of the rank that sends most."""
    console = console or plain_console()
    print_usage([rank.usage for rank in ranks], console, rank_numbers=[rank.rank for rank in ranks])
    most = max(ranks, key=lambda rank: rank.usage.sent_in_all)
    if not most.collectives:
        return
    columns = [*texts("collective", "axis"), *numbers("ranks", "count", "sent")]
    rows = [
        [
            collective.kind,
            collective.axis,
            str(collective.ranks),
            f"{collective.count:,}",
            decimal_size(collective.sent),
        ]
        for collective in most.collectives
    ]
    console.print(table(columns, rows, title=f"messages of rank {most.rank} in one step"))


def _class_table(metrics: Mapping[str, Mapping[str, float]]) -> Table:
    """The classification report: a row for each class, a column for each metric."""
    rows = []
    for label in next(iter(metrics.values())):
        of_class = [values[label] for values in metrics.values()]
        rows.append([label, *(f"{n:,}" if isinstance(n, int) else f"{n:.3f}" for n in of_class)])
    return table([*texts("class"), *numbers(*metrics)], rows, title="held-out samples by class")


def _matrix_table(name: str, rows: Mapping[str, Sequence[Any]]) -> Table:
    """A confusion matrix: a row for each true class, a column for each predicted one."""
    cells = [[label, *map(str, counts)] for label, counts in rows.items()]
    title = f"{name.replace('_', ' ')} (rows: true, columns: predicted)"
    return table([*texts(""), *numbers(*rows)], cells, title=title)


_MOST_PROFILED = 16  # ranks that a profile shows

# How the straggler spends the phase that delays the others.
_STRAGGLER_KINDS = {"busy": "where it works", "idle": "where it is idle"}


def print_profile(profile: Profile, console: Console | None = None) -> None:
    """Print the parts of a step's time for each rank, the straggler, and the folder of the traces."""
    console = console or plain_console(width=WIDTH)
    first, last = profile.steps[0], profile.steps[-1]
    rows = []
    for rank in profile.ranks[:_MOST_PROFILED]:
        cells = [
            f"{rank.categories[name] * 1e3:.1f} {rank.categories[name] / rank.seconds:4.0%}" for name in CATEGORIES
        ]
        rows.append([str(rank.rank), f"{rank.seconds * 1e3:.1f}", *cells, f"{rank.overlapped * 1e3:.1f}"])
    console.print(
        table(
            numbers("rank", "step", *CATEGORIES, "overlapped", whole=True),
            rows,
            title=f"{profile.layout}: where a step's time goes, ms and share, mean of steps {first} to {last}",
            caption="they add up to the step, except overlapped: messages during which the rank computed",
        )
    )
    if len(profile.ranks) > _MOST_PROFILED:
        console.print(f"{len(profile.ranks) - _MOST_RANKS} more ranks stand in profile.json", soft_wrap=True)
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
