"""Translates a configuration: finds its format, reads it into a job, and writes a job file or another tool's file."""

import ast
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep import jobfile
from samestep.engines.config_file import (
    NotJsonError,
    config_text,
    json_of,
    refuse_no_texts,
    unique,
    without_comments,
    yaml_of,
)
from samestep.errors import UserError, closest
from samestep.input_files import wrong_path
from samestep.job import Job
from samestep.layout import Layout
from samestep.translate.accelerate import ReadAccelerate, WriteAccelerate
from samestep.translate.base import ConfigReader, ConfigWriter, Draft, GivenSizes, Written
from samestep.translate.deepspeed import ReadDeepSpeed, WriteDeepSpeed
from samestep.translate.sagemaker import ReadSageMaker
from samestep.translate.torchrun import ReadTorchrun, calls_launcher

READERS: Mapping[str, ConfigReader] = {
    "accelerate": ReadAccelerate(),
    "deepspeed": ReadDeepSpeed(),
    "sagemaker": ReadSageMaker(),
    "torchrun": ReadTorchrun(),
}

WRITERS: Mapping[str, ConfigWriter] = {
    "accelerate": WriteAccelerate(),
    "deepspeed": WriteDeepSpeed(),
}


STANDARD_INPUT = "-"


@dataclass(frozen=True, kw_only=True)
class Source:
    """The configuration to translate, its name in messages, and its file if it is one."""

    name: str
    content: Any  # the value of the JSON, Python literal or YAML; the text itself if it is none of these
    file: Path | None = None


def source_of(words: Sequence[str]) -> Source:
    """Read the source: one word is a file, - for standard input, or a launcher; several are a command.

    Raises UserError if it can't be read.
    """
    if not words:
        raise UserError("nothing to translate; write a FILE, - for standard input, or a command behind --")
    if len(words) > 1:
        if words[0] == STANDARD_INPUT or Path(words[0]).is_file():
            first = "standard input" if words[0] == STANDARD_INPUT else f"the file {words[0]}"
            raise UserError(f"{first} and more are given ({' '.join(words[1:])}); one FILE, or a command behind --")
        return Source(name="the command line", content=shlex.join(words))
    if words[0] == STANDARD_INPUT:
        return Source(name="standard input", content=_content("standard input", sys.stdin.read()))
    file = Path(words[0])
    if calls_launcher(words[0]) and (wrong_path(words[0]) or not file.exists()):
        return Source(name="the command line", content=words[0])
    return Source(
        name=str(file),
        content=_content(str(file), config_text(file, hint="; a command is translated behind --")),
        file=file,
    )


def _content(name: str, text: str) -> Any:
    """Parse a text as JSON, a Python literal (also `distribution = {...}`) or YAML, in this order; else the text."""
    if not text.strip():
        raise UserError(f"{name} is empty")
    if without_comments(text).lstrip()[:1] not in ("{", "["):
        literal = _python_literal(name, text)
        return yaml_of(name, text) if literal is None else literal
    try:
        return json_of(name, text)
    except NotJsonError as error:
        literal = _python_literal(name, text)
        if literal is not None:
            return literal
        value: Any = None
        with suppress(UserError):
            value = yaml_of(name, text)  # sections in brackets, with keys without quotes
        if not isinstance(value, (dict, list)):
            raise error from None
        return value


def _python_literal(name: str, text: str) -> Any:
    """Parse a dictionary in Python's syntax; None if the text is something else."""
    try:
        tree = ast.parse(text.strip(), mode="exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if len(tree.body) != 1 or not isinstance(tree.body[0], (ast.Assign, ast.AnnAssign, ast.Expr)):
        return None
    value = tree.body[0].value
    if not isinstance(value, ast.Dict):
        return None
    try:
        for inner in ast.walk(value):
            if isinstance(inner, ast.Dict):
                unique(name, [(ast.literal_eval(key) if key else "**", None) for key in inner.keys])
        literal = ast.literal_eval(value)
    except (ValueError, TypeError, MemoryError, RecursionError):  # TypeError: a list as a key
        raise UserError(
            f"{name}: a Python dictionary that is more than a literal; write its values instead of names and calls"
        ) from None
    refuse_no_texts(name, literal)
    return literal


JOB = "job"


def translate(words: Sequence[str], from_: str | None, to: str, user_sizes: GivenSizes) -> Written:
    """Translate a configuration; returns the text, with remarks on what the other format can't express.

    Raises UserError for an unknown or ambiguous format, and for a source that can't be read or translated.
    """
    if to != JOB and to not in WRITERS:
        raise UserError(f'--to is "{to}"; {closest(to, [JOB, *WRITERS])}')
    if from_ is not None and from_ != JOB and from_ not in READERS:
        raise UserError(f'--from is "{from_}"; {closest(from_, [JOB, *READERS])}')
    source = source_of(words)
    form = from_ or _format_of(source)
    if form == JOB and to == JOB:
        raise UserError(f"{source.name} is a job file already; use --to {' or --to '.join(WRITERS)}")
    job, draft = (_job_of(source), None) if form == JOB else _read(form, source, user_sizes)
    if to == JOB:
        assert draft is not None  # only a job file has none, and that is refused above
        return Written(text=draft.text(f"{READERS[form].title} ({source.name})"))
    layout = Layout.parse(job.run.layout, user_sizes.processes or job.run.processes)
    written = WRITERS[to].write(job, layout)
    remarks = [*(draft.remarks if draft else ()), *(_assumed(draft) if draft else ()), *written.remarks]
    return Written(text=written.text, remarks=remarks)


def _assumed(draft: Draft) -> list[str]:
    """Remarks on values that the source doesn't have but the written file needs."""
    return [
        f"{key}: not in the source, so samestep's default is taken; {fix}"
        for key, fix in (("recipe.batch", "use --batch for another"), ("recipe.optimizer", "write yours"))
        if draft.get(key) is None
    ]


def _read(form: str, source: Source, user_sizes: GivenSizes) -> tuple[Job, Draft]:
    """Read a source into a job. If samestep would refuse the job, adds a remark with the reason."""
    try:
        draft = READERS[form].read(source.content, user_sizes)
        job = draft.job()
    except UserError as error:
        raise UserError(f"{source.name}: {error}") from None
    if why := _refusal(job, draft):
        draft.remark("samestep train", None, f"would refuse this job: {why}")
    return job, draft


def _refusal(job: Job, draft: Draft) -> str | None:
    """The reason why samestep's own engine would refuse a job; None if it would not."""
    from samestep.engines.checks import check_layout
    from samestep.engines.registry import resolve

    layout = Layout.parse(draft.tried_layout())
    try:
        check_layout(resolve(job.run.engine), layout, job.recipe.precision, job.run.engine_config)
        if draft.get("recipe.batch") is not None:
            layout.check_batch(job.recipe.batch, job.run.micro_batch)
    except UserError as error:
        return str(error)
    return None


def _job_of(source: Source) -> Job:
    if source.file is None:
        raise UserError(f"{source.name}: a job is read from a file; give its path")
    return jobfile.load(source.file).job


def _format_of(source: Source) -> str:
    """The format of a source's content. Raises UserError if no format or several recognise it."""
    content = source.content
    if isinstance(content, Mapping) and ("recipe" in content or "run" in content):
        return JOB
    names = [name for name, reader in READERS.items() if reader.recognises(content)]
    if len(names) == 1:
        return names[0]
    titles = ", ".join(reader.title for reader in READERS.values())
    if not names:
        raise UserError(f"{source.name} is none of these: {titles}, a job file; --from says which it is meant to be")
    raise UserError(f"{source.name} could be {' or '.join(names)}; --from says which")
