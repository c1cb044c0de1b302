"""Tables of checkpoints in the terminal: which there are, what one holds, and which of them are damaged."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from samestep.checkpoint.folder import FoundCheckpoint, best_of
from samestep.checkpoint.inspect import COMPLETE, UNFINISHED, ListedCheckpoint, Verified
from samestep.convert.convert import Converted
from samestep.convert.formats import Contents
from samestep.display.tables import numbers, plain_console, table, texts, values_table
from samestep.errors import UserError, printable
from samestep.sizes import decimal_size

_MOST_SHOWN = 500  # characters of what a checkpoint says of itself


def print_listed(
    checkpoints: Sequence[ListedCheckpoint], best: str | None, *, lowest: bool, console: Console | None = None
) -> None:
    """A line a checkpoint; the one with the best value of a metric is marked. Raises UserError where none has it."""
    console = console or plain_console(highlight=False)
    marked = None if best is None else best_in(checkpoints, best, lowest=lowest)
    columns = [
        *numbers("step", whole=True),
        *numbers("epoch"),
        *texts("saved at", whole=True),
        *texts("layout"),
        *numbers("ranks"),
        *numbers("size", whole=True),
        *texts("metrics", least=15),
        *texts("", least=len(COMPLETE)),
    ]
    rows = [_listed_row(checkpoint, is_best=checkpoint is marked) for checkpoint in checkpoints]
    console.print(table(columns, rows, title=str(checkpoints[0].path.parent), lines="none"))
    for checkpoint in checkpoints:
        if checkpoint.state not in (COMPLETE, UNFINISHED):
            console.print(f"{checkpoint.path.name}: {checkpoint.state}", soft_wrap=True)


def _listed_row(listed: ListedCheckpoint, *, is_best: bool) -> list[str]:
    """What a checkpoint says of itself; of one that is damaged or unfinished its bytes and name."""
    info = listed.info
    if info is None:
        state = listed.state if listed.state == UNFINISHED else "damaged"
        return ["", "", "", "", "", decimal_size(listed.bytes), listed.path.name, state]
    return [
        f"{info.step:,}",
        "" if info.epoch is None else str(info.epoch),
        info.saved_at[5:16].replace("T", " "),
        info.layout or "weights",
        str(info.processes or ""),
        decimal_size(listed.bytes),
        ", ".join(f"{name} {value:.4g}" for name, value in info.metrics.items()),
        "the best" if is_best else listed.state,
    ]


def best_in(checkpoints: Sequence[ListedCheckpoint], metric: str, *, lowest: bool) -> ListedCheckpoint:
    """The checkpoint with the best value of a metric. Raises UserError where none has it."""
    whole = [checkpoint for checkpoint in checkpoints if checkpoint.info is not None and checkpoint.state == COMPLETE]
    best = best_of(
        [FoundCheckpoint(path=checkpoint.path, info=checkpoint.info) for checkpoint in whole if checkpoint.info],
        metric,
        lowest=lowest,
    )
    if best is None:
        there = dict.fromkeys(name for checkpoint in whole if checkpoint.info for name in checkpoint.info.metrics)
        raise UserError(
            f"--best is {metric}, and no checkpoint has that metric; there are: {', '.join(there) or 'none'}"
        )
    return next(checkpoint for checkpoint in whole if checkpoint.path == best.path)


def print_contents(contents: Contents, console: Console | None = None) -> None:
    """What a checkpoint says of itself, every tensor of its model, and bytes of the rest by kind."""
    console = console or plain_console(highlight=False)
    console.print(f"{contents.path} ({contents.format})", soft_wrap=True)
    if contents.info is not None:
        _print_info(contents, console)
    tensors = [
        [held.name, " x ".join(map(str, held.shape)) or "a number", held.dtype, decimal_size(held.bytes)]
        for held in contents.tensors
        if held.kind == "model"
    ]
    tied = [[name, f"as {other}", "", ""] for name, other in contents.tied.items()]
    columns = [*texts("tensor", "shape", "dtype"), *numbers("size")]
    console.print(table(columns, [*tensors, *tied], title="model", lines="head"))
    sizes = [[kind, decimal_size(size)] for kind, size in contents.bytes_by_kind().items()]
    console.print(table([*texts(""), *numbers("size")], sizes, lines="head"))


def _print_info(contents: Contents, console: Console) -> None:
    """What a checkpoint says of itself."""
    info = contents.info
    assert info is not None
    rows = {
        "steps taken": f"{info.step:,}",
        "epoch": info.epoch,
        "saved at": info.saved_at,
        "layout": info.layout,
        "processes": info.processes or None,
        "engine": info.engine,
        "task": info.recipe.get("task"),
        "metrics": ", ".join(f"{name} {value:.6g}" for name, value in info.metrics.items()),
        "files": f"{len(info.files)}, {decimal_size(sum(file_sum.bytes for file_sum in info.files.values()))}",
        **(info.identity.summary() if info.identity is not None else {}),
        "versions": ", ".join(f"{name} {version}" for name, version in info.versions.items()),
    }
    shown = {name: str(value) for name, value in rows.items() if value not in (None, "")}
    console.print(values_table({name: printable(value, _MOST_SHOWN) for name, value in shown.items()}))


def print_verified(results: Mapping[Path, Verified], console: Console | None = None) -> None:
    """A line a checkpoint: whole, or what is wrong with it."""
    console = console or plain_console(highlight=False)
    for path, result in results.items():
        whole = "whole" if result.note is None else f"whole; {result.note}"
        console.print(f"{path}: {whole if result.fault is None else f'DAMAGED: {result.fault}'}", soft_wrap=True)


def print_converted(converted: Converted, console: Console | None = None) -> None:
    """One line: what was written, of what, from where."""
    console = console or plain_console(highlight=False)
    size = decimal_size(converted.bytes)
    console.print(
        f"{converted.target}: {converted.to_format}, {converted.tensors:,} tensors, {size}, "
        f"from {converted.from_format} in {converted.source}",
        soft_wrap=True,
    )
