"""A conversion: finds out what the source is, opens it, writes its weights next to the target, and names it last."""

import ctypes
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError

from samestep.checkpoint.compatibility import check_base, fingerprint
from samestep.convert.adapters import merged
from samestep.convert.base import Format, OutputOptions, Weights
from samestep.convert.formats import FORMATS, format_of
from samestep.errors import CheckpointError, UserError, closest
from samestep.job import Job
from samestep.parallel.state_shards import MODEL, whole_piece
from samestep.progress import phases
from samestep.progress.bars import Bar
from samestep.recipe import Recipe
from samestep.sizes import parse_size
from samestep.tasks import TASKS
from samestep.tasks.registry import resolve
from samestep.tasks.transformers_model import Pretrained
from samestep.training.fit import build_model


def give_back() -> None:
    """Return freed heap memory to the system where the C library supports it; takes about a millisecond."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)


DTYPES: Mapping[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_WRITING = ".writing"


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What was written."""

    source: Path
    target: Path
    from_format: str
    to_format: str
    tensors: int
    bytes: int  # of the tensors


def convert(
    source: Path,
    target: Path,
    *,
    from_: str | None = None,
    to: str | None = None,
    dtype: str | None = None,
    shard_size: str = "4GB",
    job: Job | None = None,
    merge: bool = False,
) -> Converted:
    """Write a model's weights in another format. Tensors are read one by one.

    `job` says what the model is, where a format wants its configuration and the source doesn't say it. `merge`:
    adapters are merged into their base, which the job's task builds. Raises
    UserError for what can't be read or written; nothing is left at `target` then.
    """
    from_ = from_ or format_of(source)
    form = _known("--from", from_)
    to = to or _format_of_name(target)
    target_format = _known("--to", to)
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype is {dtype}; use {', '.join(DTYPES)}")
    options = OutputOptions(shard_bytes=_bytes(shard_size), pretrained=lambda weights: _pretrained(weights, job))
    _check_free(target)
    with form.open(source) as weights:
        if not weights.entries:
            raise CheckpointError(f"{source} holds no tensors")
        recipe = job.recipe if job is not None else recipe_of(weights)
        if merge:
            with phases.phase("building the model into which adapters are merged"):
                weights = _merged(weights, recipe)
        elif weights.base is not None and target_format.holds == "whole":
            others = [name for name, form_ in FORMATS.items() if form_.holds != "whole"]
            raise CheckpointError(
                f"{source} holds adapters without their base, and {target_format.title} is of a whole model; use "
                f"--merge, or --to {', '.join(others)}"
            )
        weights = weights if dtype is None else weights.cast(DTYPES[dtype])
        with Bar(f"write {target.name}", len(weights.entries), unit="tensor") as bar:
            _write(target_format, target, weights.watched(_Reading(bar)), options)
        return Converted(
            source=source,
            target=target,
            from_format=from_,
            to_format=to,
            tensors=len(weights.entries),
            bytes=weights.bytes,
        )


def export_model(
    recipe: Recipe,
    checkpoint: str | Path,
    target: str | Path,
    *,
    to: str = "hugging-face",
    dtype: str | None = None,
    merge: bool = False,
) -> Path:
    """Write the weights of a checkpoint, a run's folder or a weights file as a folder that `from_pretrained` loads.

    `to`: another format of `samestep checkpoint convert`. `dtype`, such as "bfloat16": what the weights are cast to.
    `merge`: adapters are merged into their base. Raises UserError where the recipe's model is none of transformers',
    or `target` is there already.
    """
    job = Job(recipe=recipe)
    return convert(Path(checkpoint), Path(target), to=to, dtype=dtype, job=job, merge=merge).target


class _Reading:
    """Advances the progress bar, and returns freed memory to the system after every few megabytes read."""

    _OFTEN = 8 << 20  # bytes

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._read = 0  # bytes since memory was last returned

    def __call__(self, count: int) -> None:
        """Count `count` bytes read: advance the bar, and trim the heap from time to time."""
        self._bar.advance()
        self._read += count
        if self._read >= self._OFTEN:
            give_back()
            self._read = 0


def _format_of_name(target: Path) -> str:
    """Return the format that the name of a new path selects. Raises UserError if there is none, or several."""
    fitting = [name for name, form in FORMATS.items() if form.fits(target)]
    if len(fitting) == 1:
        return fitting[0]
    folders = ", ".join(name for name, form in FORMATS.items() if form.is_folder)
    raise UserError(f"{target} doesn't say what is to be written; --to does: {folders} for a folder, {_files()}")


def _files() -> str:
    return ", ".join(name for name, form in FORMATS.items() if not form.is_folder) + " for a file"


def _known(flag: str, name: str) -> Format:
    """A format by its name. Raises UserError where there is none, with the flag that named it."""
    if name not in FORMATS:
        raise UserError(f'{flag} is "{name}"; {closest(name, FORMATS)}')
    return FORMATS[name]


def _bytes(text: str) -> int:
    """A size such as 4GB in bytes. Raises UserError for any other text."""
    size = parse_size(text, kilo=1000)
    if size is None or text[-1].isdigit():
        raise UserError(f"--shard-size is {text}; use a size such as 500MB or 4GB, below 1 PB")
    if size < 1:
        raise UserError(f"--shard-size is {text}; use more than nothing")
    return int(size)


def _pretrained(weights: Weights, job: Job | None) -> Pretrained | None:
    """Return configuration and tokenizer of the job's model, or of the source's recipe; None without either.

    Raises UserError for a model that is not from transformers.
    """
    recipe = job.recipe if job is not None else recipe_of(weights)
    if recipe is None:
        return None
    pretrained = resolve(recipe).pretrained()
    if pretrained is None:
        raise UserError(f"the model of task {recipe.task} is none of transformers', so it has no Hugging Face folder")
    return pretrained


def _merged(weights: Weights, recipe: Recipe | None) -> Weights:
    """Merge adapters into their base, which the job's task builds.

    Raises UserError for another base.
    """
    if recipe is None:
        raise UserError(
            "--merge: the base of these adapters is what a job's task builds, and nothing here says which; use "
            "--job JOB.yaml, of the job that trained them"
        )
    task = resolve(recipe)
    model = build_model(task, recipe).model
    if weights.base is not None and weights.base.fingerprint:
        held = {MODEL + name: whole_piece(parameter) for name, parameter in model.named_parameters()}
        here = [name for name in weights.base.left_out if MODEL + name in held]
        check_base(weights.base, here, fingerprint(held, here), "of these adapters")
    return merged(weights, model)


def recipe_of(weights: Weights) -> Recipe | None:
    """Return the source's recipe if its task ships with samestep; a user's task would be a file with code."""
    if weights.recipe.get("task") not in TASKS:
        return None
    try:
        return TypeAdapter(Recipe).validate_python(dict(weights.recipe))
    except ValidationError:
        return None


def _check_free(target: Path) -> None:
    """Raise UserError where the target is there, or can't be made."""
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} is there already; use another path")
    if target.name in ("", ".."):
        raise UserError(f"{target} is no name for a new file or folder")
    there = next(path for path in target.absolute().parents if path.exists())
    if not there.is_dir():
        raise UserError(f"{target} can't be written: {there} is a file; use another path")


def _write(form: Format, target: Path, weights: Weights, options: OutputOptions) -> None:
    """Write next to the target, and move what was written there when it is whole."""
    into = target.with_name(target.name + _WRITING)
    try:
        _clear(into)
        into.mkdir(parents=True)
        form.write(into, target.name, weights, options)
        _place(form, into, target)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{target} can't be written: {reason}; use another folder") from None
    finally:
        _clear(into)


def _place(form: Format, into: Path, target: Path) -> None:
    """Move the written files to their final names: a folder at once; of several files the index last."""
    if form.is_folder:
        into.rename(target)
        return
    files = sorted(into.iterdir(), key=lambda path: path.suffix == ".json")  # an index last
    for file in files:
        if (target.parent / file.name).exists():
            raise CheckpointError(f"{target.parent / file.name} is there already; use another folder")
    for file in files:
        file.rename(target.parent / file.name)


def _clear(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
