"""Tables of checkpoints in the terminal: which there are, what one holds, and which of them are damaged."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from samestep.checkpoint.folder import FoundCheckpoint, best_of
from samestep.checkpoint.inspect import COMPLETE, UNFINISHED, Listed
from samestep.convert.convert import Converted
from samestep.convert.formats import Contents
from samestep.display.console import plain_console
from samestep.errors import UserError


def print_listed(found: Sequence[Listed], best: str | None, *, lowest: bool, console: Console | None = None) -> None:
    """A line a checkpoint; the one with the best value of a metric is marked. Raises UserError where none has it."""
    console = console or plain_console(highlight=False)
    marked = None if best is None else best_in(found, best, lowest=lowest)
    table = Table(title=str(found[0].path.parent), box=None, padding=(0, 2, 0, 0))
    for title in ("step", "epoch", "saved at", "layout", "ranks", "size"):
        justify = "right" if title in ("step", "epoch", "ranks", "size") else "left"
        table.add_column(title, justify=justify, no_wrap=title in ("step", "saved at", "size"))
    table.add_column("metrics", overflow="fold", min_width=15)
    table.add_column("", overflow="fold", min_width=len(COMPLETE))
    for each in found:
        info = each.info
        if info is None:
            state = each.state if each.state == UNFINISHED else "damaged"
            table.add_row("", "", "", "", "", decimal(each.bytes), each.path.name, state)
            continue
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in info.metrics.items())
        epoch = "" if info.epoch is None else str(info.epoch)
        processes = str(info.processes or "")
        state = "the best" if each is marked else each.state
        table.add_row(
            f"{info.step:,}",
            epoch,
            info.saved_at[5:16].replace("T", " "),
            info.layout or "weights",
            processes,
            decimal(each.bytes),
            metrics,
            state,
        )
    console.print(table)
    for each in found:
        if each.state not in (COMPLETE, UNFINISHED):
            console.print(f"{each.path.name}: {each.state}", soft_wrap=True)


def best_in(found: Sequence[Listed], metric: str, *, lowest: bool) -> Listed:
    """The checkpoint with the best value of a metric. Raises UserError where none has it."""
    whole = [each for each in found if each.info is not None and each.state == COMPLETE]
    best = best_of(
        [FoundCheckpoint(path=each.path, info=each.info) for each in whole if each.info], metric, lowest=lowest
    )
    if best is None:
        there = dict.fromkeys(name for each in whole if each.info for name in each.info.metrics)
        raise UserError(
            f"--best is {metric}, and no checkpoint has that metric; there are: {', '.join(there) or 'none'}"
        )
    return next(each for each in whole if each.path == best.path)


def print_contents(contents: Contents, console: Console | None = None) -> None:
    """What a checkpoint says of itself, every tensor of its model, and bytes of the rest by kind."""
    console = console or plain_console(highlight=False)
    console.print(f"{contents.path} ({contents.format})", soft_wrap=True)
    if contents.info is not None:
        _print_info(contents, console)
    model = Table(title="model", box=SIMPLE)
    model.add_column("tensor", overflow="fold")
    model.add_column("shape")
    model.add_column("dtype")
    model.add_column("size", justify="right")
    for held in contents.tensors:
        if held.kind == "model":
            shape = " x ".join(map(str, held.shape)) or "a number"
            model.add_row(held.name, shape, held.dtype, decimal(held.bytes))
    for name, known in contents.tied.items():
        model.add_row(name, f"as {known}", "", "")
    console.print(model)
    sums = Table(box=SIMPLE)
    sums.add_column("")
    sums.add_column("size", justify="right")
    for kind, size in contents.bytes_by_kind().items():
        sums.add_row(kind, decimal(size))
    console.print(sums)


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
        "files": f"{len(info.files)}, {decimal(sum(each.bytes for each in info.files.values()))}",
        "versions": ", ".join(f"{name} {version}" for name, version in info.versions.items()),
    }
    table = Table(show_header=False)
    for name, value in rows.items():
        if value not in (None, ""):
            table.add_row(name, str(value))
    console.print(table)


def print_verified(faults: Mapping[Path, str | None], console: Console | None = None) -> None:
    """A line a checkpoint: whole, or what is wrong with it."""
    console = console or plain_console(highlight=False)
    for path, fault in faults.items():
        console.print(f"{path}: {'whole' if fault is None else f'DAMAGED: {fault}'}", soft_wrap=True)


def print_converted(converted: Converted, console: Console | None = None) -> None:
    """One line: what was written, of what, from where."""
    console = console or plain_console(highlight=False)
    size = decimal(converted.bytes)
    console.print(
        f"{converted.target}: {converted.to_format}, {converted.tensors:,} tensors, {size}, "
        f"from {converted.from_format} in {converted.source}",
        soft_wrap=True,
    )
