"""A translation: find the format, read it into a job, and write that as a job file or in another tool's format."""

from collections.abc import Mapping, Sequence

from samestep import jobfile
from samestep.errors import UserError, closest
from samestep.job import Job
from samestep.layout import Layout
from samestep.translate.base import Asked, Written
from samestep.translate.draft import Draft
from samestep.translate.formats import READERS, WRITERS
from samestep.translate.source import Source, source_of

JOB = "job"


def translate(words: Sequence[str], from_: str | None, to: str, asked: Asked) -> Written:
    """What was given, in the other format, and what could not be said in it. Raises UserError."""
    if to != JOB and to not in WRITERS:
        raise UserError(f'--to is "{to}"; {closest(to, [JOB, *WRITERS])}')
    if from_ is not None and from_ != JOB and from_ not in READERS:
        raise UserError(f'--from is "{from_}"; {closest(from_, [JOB, *READERS])}')
    source = source_of(words)
    form = from_ or _format_of(source)
    if form == JOB and to == JOB:
        raise UserError(f"{source.name} is a job file already; --to {' or --to '.join(WRITERS)} would do")
    job, draft = (_job_of(source), None) if form == JOB else _read(form, source, asked)
    if to == JOB:
        assert draft is not None  # a job file alone has none, and is refused above
        return Written(text=draft.text(f"{READERS[form].title} ({source.name})"))
    layout = Layout.parse(job.run.layout, asked.processes or job.run.processes)
    written = WRITERS[to].write(job, layout)
    remarks = [*(draft.remarks if draft else ()), *(_assumed(draft) if draft else ()), *written.remarks]
    return Written(text=written.text, remarks=remarks)


def _assumed(draft: Draft) -> list[str]:
    """What a source leaves open, and a file of another tool can't."""
    return [
        f"{key}: not in the source, so samestep's default is taken; {fix}"
        for key, fix in (("recipe.batch", "--batch says another"), ("recipe.optimizer", "write yours"))
        if draft.get(key) is None
    ]


def _read(form: str, source: Source, asked: Asked) -> tuple[Job, Draft]:
    """The job of a source. What keeps it from running as it is becomes a remark."""
    try:
        draft = READERS[form].read(source.content, asked)
        job = draft.job()
    except UserError as error:
        raise UserError(f"{source.name}: {error}") from None
    if why := _refusal(job, draft):
        draft.remark("samestep train", None, f"would refuse this job: {why}")
    return job, draft


def _refusal(job: Job, draft: Draft) -> str | None:
    """Why samestep's own engine would refuse a job; None where it wouldn't."""
    from samestep.engines import resolve as engines

    layout = Layout.parse(draft.tried_layout())
    try:
        engines.check(engines.resolve(job.run.engine), layout, job.recipe.precision, job.run.engine_config)
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
    """The format that the content is of. Raises UserError where it could be none or several."""
    content = source.content
    if isinstance(content, Mapping) and ("recipe" in content or "run" in content):
        return JOB
    found = [name for name, reader in READERS.items() if reader.recognises(content)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(reader.title for reader in READERS.values())
    if not found:
        raise UserError(f"{source.name} is none of these: {known}, a job file; --from says which it is meant to be")
    raise UserError(f"{source.name} could be {' or '.join(found)}; --from says which")
