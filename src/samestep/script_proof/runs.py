"""The runs of a proof: the script alone, alone once more with its rows in another order, and split over ranks."""

import fnmatch
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from samestep import subprocess_group
from samestep.errors import UserError
from samestep.progress import phases
from samestep.recording.differences import compare_tensors, overall
from samestep.recording.record import RankRecord, RunRecord
from samestep.recording.store import events, steps_in
from samestep.script_proof import extensions
from samestep.script_proof.children import LAUNCHER, gather
from samestep.script_proof.devices import NO_ACCELERATOR
from samestep.script_proof.follow import following
from samestep.script_proof.imports import starts_processes
from samestep.script_proof.sampling import check_steps, places_matter
from samestep.script_proof.settings import FEWER_DEVICES, RECORDER, SETTINGS, RecordSettings, Variant

ALONE, AGAIN, SPLIT = "alone", "again", "split"
LOGS = "logs"  # what each rank wrote, in a run's folder
# Ways to measure rounding, in the order in which they are tried.
VARIANTS: Mapping[str, Sequence[Variant]] = {
    "order": ("reversed", "moved"),
    "micro-batches": ("halves", "reversed", "moved"),
}
OWN = "alone-own"  # the run alone with its own batches, where it was run once more with those of the split run


@dataclass(frozen=True, kw_only=True)
class ScriptProof:
    """Options of a script proof."""

    script: tuple[str, ...]  # train.py and its arguments, or -m, a module and its arguments; NAME=VALUE before it
    alone: tuple[str, ...] | None = None  # with one process; None: the same
    then: tuple[str, ...] | None = None  # command that resumes where the split run ended
    processes: int = 2
    alone_processes: int = 1  # of the run that the split one is compared with
    engine: str = "torch"
    device: str = "auto"
    on: str | None = None  # cpu or gpu:N: where accelerators that the script names are
    tiny: bool = False  # whether models of transformers get two layers
    steps: int | None = 10
    every: int = 1
    modules: str | None = None
    dropout: bool = False
    dtype: str | None = None
    seed: int | None = None
    noise: str = "order"  # of VARIANTS
    time_limit: float = 600.0  # seconds of one run
    launch: tuple[str, ...] = ()  # further options of `samestep launch` for the split run

    @property
    def settings(self) -> RecordSettings:
        return RecordSettings(
            folder="",
            steps=self.steps,
            every=self.every,
            modules=self.modules,
            dropout=self.dropout,
            dtype=self.dtype,
            seed=self.seed,
            on=self.on,
            tiny=self.tiny,
        )


def words(flag: str, text: str, *, script: bool = True) -> tuple[str, ...]:
    """Split an option's text into words; those of a `script` are checked. Raises UserError."""
    try:
        command = tuple(shlex.split(text))
    except ValueError:
        raise UserError(f"{flag} {text}: a quote has no end") from None
    if not script:
        return command
    variables, command = with_variables(command)
    if command[:1] == ("python",) or command[:1] == ("python3",):
        command = command[1:]
    if not command:
        raise UserError(f'{flag} is empty; use {flag} "train.py --batch-size 16"')
    if command[0] == "-m":
        if len(command) == 1:
            raise UserError(f'{flag} "-m" names no module; use {flag} "-m package.module"')
    elif not Path(command[0]).is_file():
        raise UserError(f"{flag} {command[0]}: there is no such script in {Path.cwd()}")
    elif not command[0].endswith(".py"):
        raise UserError(
            f"{flag} {command[0]}: this is no script of Python's; use train.py or -m module, without a launcher"
        )
    return (*(f"{name}={value}" for name, value in variables.items()), *command)


_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


def with_variables(command: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The variables that stand before a command, as in a shell, and the rest of it."""
    count = next((at for at, word in enumerate(command) if not _ASSIGNMENT.match(word)), len(command))
    return dict(word.split("=", 1) for word in command[:count]), tuple(command[count:])


@dataclass(frozen=True, kw_only=True)
class ScriptStart:
    """One run to start."""

    name: str  # of its folder
    command: tuple[str, ...]  # the script and its arguments
    settings: RecordSettings
    ranks: int
    place: Path  # the folder
    further: tuple[str, ...] = ()  # options of `samestep launch`

    @property
    def title(self) -> str:
        return f"{shlex.join(self.command)} with {self.ranks} process{'es' if self.ranks > 1 else ''}"

    def status(self) -> str:
        """What this run does, with the steps that it has recorded."""
        steps = steps_in(self.place / "rank-0")
        if not steps and (operators := extensions.compiling(self.settings_file.stat().st_mtime)):
            return f"running {self.title}, which compiles {', '.join(operators)}, once for this machine"
        return f"running {self.title}, {steps:,} steps recorded"

    @property
    def settings_file(self) -> Path:
        return self.place / SETTINGS

    @property
    def rank_command(self) -> tuple[str, ...]:
        """The module that a rank runs, and its arguments."""
        return ("samestep.script_proof.runner", f"{RECORDER}{self.settings_file}", *self.command)


Starter = Callable[[Sequence[ScriptStart], ScriptProof], Sequence[subprocess_group.CommandOutcome]]


def launched(starts: Sequence[ScriptStart], proof: ScriptProof) -> list[subprocess_group.CommandOutcome]:
    """Start runs one after the other, each by `samestep launch`."""
    outcomes = []
    for start in starts:
        ranks = () if _names_hosts(start.further) else ("--num-procs", str(start.ranks))
        command = [
            *(sys.executable, "-m", "samestep", "launch", *ranks, "--threads", "1"),
            *("--bind", "none", "--device", proof.device, "--engine", proof.engine),
            *("--logs", str(start.place / LOGS), "--output", "files", *start.further),
            *("--", "-m", *start.rank_command),
        ]
        phases.say(f"{start.name}: {start.title}")
        with phases.status(start.status):
            outcomes.append(subprocess_group.run(command, limit=proof.time_limit))
        if outcomes[-1].code != 0:
            break
    return outcomes


_HOSTS = frozenset({"--hostfile", "--ray", "--place", "--nodes", "--num-nodes", "--num-procs"})


def _names_hosts(options: Sequence[str]) -> bool:
    """Whether options of `samestep launch` say where ranks are, and so how many: their hosts have slots."""
    return any(option.partition("=")[0] in _HOSTS for option in options)


def run_all(proof: ScriptProof, folder: Path, starter: Starter = launched) -> None:
    """Run the script alone, split, and alone again, each run in a folder of its own.

    If the run alone has other samples in a step than the split run, it is repeated on those of the split run. Raises
    UserError if a run fails or does not end.
    """
    alone = proof.alone if proof.alone is not None else proof.script
    _run_alone(proof, folder, starter, alone)
    # One process gets what all ranks draw; several would have to share it out.
    noted = replace(proof.settings, draws=proof.alone_processes == 1)
    own = (folder / ALONE / LAUNCHER).is_dir()
    _run(proof, starter, make_start(proof, folder, SPLIT, proof.script, noted, proof.processes, own=own))
    _check_own_ranks(proof, folder)
    if proof.then is not None:
        name = f"{SPLIT}-then"
        _run(proof, starter, make_start(proof, folder, name, proof.then, proof.settings, proof.processes, own=own))
    _check_steps(folder)
    _check_modules(proof, folder)
    _check_ranks(proof, folder)
    followed = (
        following(folder / ALONE, folder / SPLIT) if proof.then is None and proof.alone_processes == 1 else None
    )
    if followed is None:
        _measure_rounding(proof, folder, starter, alone, proof.settings)
        return
    (folder / ALONE).rename(folder / OWN)
    settings = replace(
        proof.settings,
        follow=followed.folder,
        times=followed.times,
        widened=followed.widened,
        together=followed.together,
        redraw=followed.redraw,
    )
    _measure_rounding(proof, folder, starter, alone, settings, make_start(proof, folder, ALONE, alone, settings, 1))


def _run_alone(proof: ScriptProof, folder: Path, starter: Starter, alone: tuple[str, ...]) -> None:
    """Run the script alone; where it fails with as many accelerators as the split run has, with one for each rank.

    Some scripts refuse to start with fewer, and others take a rank for each.
    """
    start = make_start(proof, folder, ALONE, alone, proof.settings, proof.alone_processes)
    began = time.monotonic()
    try:
        _run(proof, starter, start)
    except UserError as error:
        devices = RecordSettings.read(start.settings_file).devices
        late = time.monotonic() - began > proof.time_limit / 2
        if proof.on is None or devices == proof.alone_processes or late:
            raise
        start.place.rename(folder / FEWER_DEVICES)
        again = make_start(proof, folder, ALONE, alone, proof.settings, proof.alone_processes)
        try:
            _run(proof, starter, again)
        except UserError as other:
            last = str(other).rpartition("\n")[2]
            raise UserError(f"{error}\nIf it is told of {again.ranks} accelerator(s): {last}") from None


def _measure_rounding(
    proof: ScriptProof,
    folder: Path,
    starter: Starter,
    alone: tuple[str, ...],
    settings: RecordSettings,
    *before: ScriptStart,
) -> None:
    """Run the script alone again, by the first variant that differs from it by rounding only.

    `before`: a run to start first, or at the same time.
    """
    # Rows in another order would meet other random numbers.
    variants: Sequence[Variant] = ("moved",) if settings.redraw is not None else VARIANTS[proof.noise]
    for variant in variants:
        varied = replace(settings, variant=variant)
        again = make_start(proof, folder, AGAIN, alone, varied, proof.alone_processes)
        _run(proof, starter, *before, again)
        before = ()
        if variant == variants[-1] or _is_rounding(variant, folder):
            return
        (folder / AGAIN).rename(_tried(folder, variant))


def run_to_end(proof: ScriptProof, folder: Path, starter: Starter, steps: int, *, split: bool = False) -> RunRecord:
    """Run the script, alone or split, with its own batches, to its end or for so many steps, without tensors."""
    settings = replace(proof.settings, steps=steps, modules="-")
    if split:
        own = (folder / ALONE / LAUNCHER).is_dir()
        start = make_start(proof, folder, f"{SPLIT}-whole", proof.script, settings, proof.processes, own=own)
    else:
        alone = proof.alone if proof.alone is not None else proof.script
        start = make_start(proof, folder, f"{ALONE}-whole", alone, settings, proof.alone_processes)
    _run(proof, starter, start)
    return RunRecord.read(start.place)


def measure_in_halves(proof: ScriptProof, folder: Path, starter: Starter) -> bool:
    """Measure rounding again: run the script alone with its model called on each half of a batch.

    Returns False, and keeps the former measurement, if the model can't be called so.
    """
    settings = RecordSettings.read(folder / ALONE / SETTINGS)
    alone = proof.alone if proof.alone is not None else proof.script
    (folder / AGAIN).rename(folder / _BEFORE_HALVES)
    halves = make_start(proof, folder, AGAIN, alone, replace(settings, variant="halves"), proof.alone_processes)
    try:
        _run(proof, starter, halves)
        if _is_rounding("halves", folder):
            return True
    except UserError:
        pass  # a script may need whole batches; the verdict without them stands
    (folder / AGAIN).rename(folder / _HALVES)
    (folder / _BEFORE_HALVES).rename(folder / AGAIN)
    return False


_BEFORE_HALVES, _HALVES = "measured-first", "measured-in-halves"


ROUNDING_AT_MOST = 1e-2  # of a gradient in the first step: what moves it by more is no rounding


def first_noise(folder: Path) -> float:
    """How far the gradients of the first step are apart in the two runs alone: all of them as one."""
    alone, again = (RunRecord.read(folder / name) for name in (ALONE, AGAIN))
    if not alone.steps or not again.steps:
        return 0.0
    return overall(compare_tensors(0, "gradient", alone, again, None))


def _is_rounding(variant: Variant, folder: Path) -> bool:
    """Whether the second run differs by rounding only: nothing depends on a sample's place in the batch."""
    if first_noise(folder) > ROUNDING_AT_MOST:
        return False
    if variant == "halves" and not any(event["event"] == "halved" for event in events(folder / AGAIN / "rank-0")):
        return False
    return not places_matter(RunRecord.read(folder / ALONE), RunRecord.read(folder / AGAIN))


def _tried(folder: Path, variant: Variant) -> Path:
    return folder / f"{AGAIN}-{variant}"


def gave_no_measure(folder: Path, variant: Variant) -> bool:
    """Whether measuring rounding by this variant failed, so that another one was used."""
    return _tried(folder, variant).is_dir()


def _run(proof: ScriptProof, starter: Starter, *starts: ScriptStart) -> None:
    began = time.time()
    extensions.remove_abandoned(began)
    try:
        outcomes = starter(starts, proof)
    finally:
        extensions.remove_abandoned(began)
    _check(starts, outcomes, proof)
    for start in starts:
        gather(start.place)


def make_start(
    proof: ScriptProof,
    folder: Path,
    name: str,
    command: tuple[str, ...],
    settings: RecordSettings,
    ranks: int,
    *,
    own: bool = False,
) -> ScriptStart:
    """Make the folder of a run, and write its settings there; `own`: the script starts the ranks itself."""
    place = folder / name
    place.mkdir(parents=True)
    variables, command = with_variables(command)
    fewer = own or starts_processes(command) or (folder / FEWER_DEVICES).is_dir()
    devices = ranks if fewer else proof.processes
    settings = replace(settings, folder=str(place), variables=variables, ranks=ranks, devices=devices)
    further = proof.launch if name.startswith(SPLIT) else ()
    start = ScriptStart(
        name=name, command=command, settings=settings, ranks=1 if own else ranks, place=place, further=further
    )
    settings.write(start.settings_file)
    return start


_ALONE = (
    " (verify needs one that works with one process as well; --alone names arguments for that, and "
    "--alone-processes 2 compares with two)"
)


_NO_ACCELERATOR = " (it asks for an accelerator, and PyTorch finds none; with --on cpu it runs on the CPU)"


def _check(
    starts: Sequence[ScriptStart], outcomes: Sequence[subprocess_group.CommandOutcome], proof: ScriptProof
) -> None:
    """Raise UserError for the first run that failed, or did not end."""
    for start, outcome in zip(starts, outcomes, strict=False):
        (start.place / "output.txt").write_text(outcome.output, encoding="utf-8")
        if outcome.code is None:
            if _waits_for_processes(start.place):
                raise UserError(
                    f"{start.title} started processes of its own and took no step of an optimizer within "
                    f"{proof.time_limit:g} s, nor did they; leave it more time with --time-limit SECONDS, or "
                    "use a script whose ranks are started by multiprocessing or torchrun"
                )
            raise UserError(
                f"{start.title} did not end within {proof.time_limit:g} s; --steps N stops it after N steps of its "
                "optimizer, --time-limit SECONDS leaves it more time"
            )
        if outcome.code != 0:
            if (early := _ended_early(start.place)) is not None:
                raise UserError(f"{start.title} failed: {early}")
            hint = _ALONE if start.ranks == 1 else ""
            if proof.on is None and NO_ACCELERATOR.search(outcome.output):
                hint = _NO_ACCELERATOR
            reason = _reason(outcome.output) or f"it ended with exit code {outcome.code} and wrote nothing"
            raise UserError(f"{start.title} failed{hint}:\n{reason}")


# What gloo, NCCL and PyTorch say of a rank that is gone.
_PEER_IS_GONE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|peer|timed? ?out|watchdog|gloo", re.IGNORECASE
)


def _ended_early(place: Path) -> str | None:
    """That a rank ended in order while others waited for its messages; None where that isn't what failed."""
    ranks = RunRecord.read(place).ranks
    ends = [str(rank.end.get("how", "")) for rank in ranks]
    over = [rank for rank, how in enumerate(ends) if how == "ended" or how.startswith("exit code")]
    waited = [rank for rank, how in enumerate(ends) if how.startswith("failed: ") and _PEER_IS_GONE.search(how)]
    others = [rank for rank, how in enumerate(ends) if how.startswith("failed: ") and rank not in waited]
    if not over or not waited or others:
        return None
    gone, left = over[0], waited[0]
    return (
        f"rank {gone} ended after {_steps(ranks[gone])}, and rank {left}, after {_steps(ranks[left])}, waited for "
        "its message, which never came; all ranks have to take as many steps and send as many messages: look at what "
        f"rank {gone} has fewer of, such as batches"
    )


def _steps(rank: RankRecord) -> str:
    return f"{len(rank.steps)} step{'s' if len(rank.steps) != 1 else ''}"


def _waits_for_processes(place: Path) -> bool:
    """Whether rank 0 of a run has started processes, and taken no step itself."""
    kinds = {event["event"] for folder in place.glob("*/") for event in events(folder)}
    return "process" in kinds and "step" not in kinds


def _check_own_ranks(proof: ScriptProof, folder: Path) -> None:
    """Raise UserError for a script that starts its ranks itself, and not so many as are to be compared."""
    place = folder / SPLIT
    if not (folder / ALONE / LAUNCHER).is_dir():
        return
    ranks = len(list(place.glob("rank-*/"))) if (place / LAUNCHER).is_dir() else 0
    if ranks != proof.processes:
        command = shlex.join(proof.script)
        raise UserError(
            f"{command} starts its ranks itself, and {ranks or 'none'} of them trained in the split run, where "
            f"--processes is {proof.processes}; give the script the argument that says how many it "
            "starts, and --alone the same for one, or pass --processes with its number"
        )


def _check_ranks(proof: ScriptProof, folder: Path) -> None:
    """Raise UserError where the hosts of --launch have another number of slots."""
    if not proof.launch:
        return
    ranks = len(RunRecord.read(folder / SPLIT).ranks)
    if ranks != proof.processes:
        raise UserError(
            f"--processes is {proof.processes}, and --launch {shlex.join(proof.launch)} has {ranks} ranks; "
            f"use --processes {ranks}, or hosts with other slots"
        )


def _check_steps(folder: Path) -> None:
    """Raise UserError for a run that trained nothing, with what it said last."""
    try:
        check_steps(RunRecord.read(folder / ALONE), RunRecord.read(folder / SPLIT))
    except UserError as error:
        words = _last_words(folder)
        raise UserError(f"{error}" + (f"; its last words:\n{words}" if words else "")) from None


def _check_modules(proof: ScriptProof, folder: Path) -> None:
    """Raise UserError where no parameter has a name of --modules: nothing would be compared."""
    if proof.modules is None:
        return
    steps = [step for rank in RunRecord.read(folder / ALONE).ranks for step in rank.steps]
    names = list(dict.fromkeys(name for step in steps for name in step.settings))
    if names and not any(fnmatch.fnmatch(name, proof.modules) for name in names):
        shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
        raise UserError(f"--modules {proof.modules}: no parameter has such a name; there are {shown}")


_NAMES_SHOWN = 8


def _last_words(folder: Path) -> str:
    """The last lines that rank 0 of the run alone wrote."""
    files = [file for end in ("out", "err", "log") for file in sorted((folder / ALONE / LOGS).rglob(f"*.{end}"))]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files or [folder / ALONE / "output.txt"]]
    return "\n".join([line for text in texts for line in text.splitlines() if line.strip()][-_LAST_LINES:])


_LAST_LINES = 5


_LAST_OF_A_FAILURE = 40
_WHERE_LOGS_ARE = "all that it wrote: "  # of `samestep launch`; the folder goes with the proof
_OWN_FILES = [str(Path(__file__).with_name(f"{name}.py")) for name in ("runner", "server", "installation")]


def _reason(output: str) -> str:
    """Return the last lines of a failed run, without the runner's own frames."""
    lines: list[str] = []
    own = False
    for line in output.splitlines():
        frame = line.lstrip().startswith('File "')
        own = (
            any(file in line for file in _OWN_FILES) or "runpy" in line if frame else own and line.startswith("    ")
        )
        if line.strip() and not own and not line.startswith(_WHERE_LOGS_ARE):
            lines.append(line.removeprefix("samestep: "))  # that of `samestep launch`
    return "\n".join(lines[-_LAST_OF_A_FAILURE:])
