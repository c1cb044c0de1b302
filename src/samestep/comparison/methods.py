"""The methods that can be compared, one line each: what takes the step, under which layout, and how it is started."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from samestep.display.page import Words
from samestep.engines.registry import engine_names
from samestep.errors import LayoutError, UserError, closest
from samestep.handwritten import PRECISIONS
from samestep.layout import Layout, unsized

Command = Callable[[Path, Path, int], Sequence[str]]  # job file, the run's folder, processes


@dataclass(frozen=True, kw_only=True)
class MethodStart:
    """A way to start processes. The command makes rank 0 write the run into the folder that it is given."""

    name: str
    command: Command
    # The precisions of the started program; None: the engine's own.
    precisions: frozenset[str] | None = None
    compiles: bool = True  # whether it takes run.compile


_LOOP = ["-m", "samestep.handwritten"]


def _train(job: Path, folder: Path, processes: int) -> Sequence[str]:
    return [sys.executable, "-m", "samestep", "train", str(job), "--folder", str(folder)]


def _alone(job: Path, folder: Path, processes: int) -> Sequence[str]:
    return [sys.executable, *_LOOP, str(job), "--folder", str(folder)]


def _spawn(job: Path, folder: Path, processes: int) -> Sequence[str]:
    return [*_alone(job, folder, processes), "--spawn", str(processes)]


def _by_launcher(module: str) -> Command:
    """The command of a script that torchrun or the like starts."""

    def command(job: Path, folder: Path, processes: int) -> Sequence[str]:
        ranks = ["--standalone", f"--nproc-per-node={processes}"]  # standalone: a free port
        return [sys.executable, "-m", module, *ranks, *_LOOP, str(job), "--folder", str(folder)]

    return command


SAMESTEP = MethodStart(name="samestep", command=_train)
HANDWRITTEN = MethodStart(name="python", command=_alone, precisions=PRECISIONS)
SPAWN = MethodStart(name="torch.multiprocessing.spawn", command=_spawn, precisions=PRECISIONS)
TORCHRUN = MethodStart(name="torchrun", command=_by_launcher("torch.distributed.run"), precisions=PRECISIONS)
LAUNCH = replace(TORCHRUN, name="torch.distributed.launch", command=_by_launcher("torch.distributed.launch"))


@dataclass(frozen=True, kw_only=True)
class ComparedMethod:
    """One row of a comparison. `{n}` in a text is replaced by the number of processes."""

    name: str
    title: Words
    engine: str  # "handwritten" is plain PyTorch, without samestep's engines
    layout: str
    start: MethodStart = SAMESTEP
    precision: str | None = None  # None: the job's
    cores: int | None = None  # shared by all its processes; None: those of every other method
    run: Mapping[str, Any] = field(
        default_factory=dict, hash=False
    )  # keys of a job's `run:` section that are this method's own
    default: bool = True  # whether it is compared where no methods are named

    @cached_property
    def sizes(self) -> Layout:
        """The layout, read once, of a method for a number of processes."""
        return Layout.parse(self.layout)

    def of(self, processes: int) -> "ComparedMethod":
        """Return this method for a number of processes."""
        return replace(
            self,
            name=self.name.format(n=processes),
            title=self.title.format(n=processes),
            layout=self.layout.format(n=processes),
        )


def _method(
    name: str, en: str, zh: str, engine: str, layout: str, start: MethodStart = SAMESTEP, **more: object
) -> ComparedMethod:
    return ComparedMethod(name=name, title=Words(en, zh), engine=engine, layout=layout, start=start, **more)  # pyright: ignore[reportArgumentType]


SINGLE_CORE, SINGLE = "single-core", "single"  # the baseline of speed-ups

# fmt: off
METHODS = (
    _method(SINGLE_CORE, "one process, one core", "单进程，单核", "native", "single", cores=1),
    _method(SINGLE, "one process, all cores", "单进程，全部核", "native", "single"),
    _method("data-parallel", "DataParallel", "DataParallel", "data-parallel", "single"),
    _method("ddp-torchrun", "DDP, torchrun", "DDP，torchrun 启动", "handwritten", "dp{n}", TORCHRUN),
    _method("ddp-spawn", "DDP, spawn", "DDP，spawn 启动", "handwritten", "dp{n}", SPAWN),
    _method("ddp-launch", "DDP, launch", "DDP，launch 启动", "handwritten", "dp{n}", LAUNCH),
    _method("ddp-compiled", "DDP, torch.compile", "DDP，torch.compile", "handwritten", "dp{n}", TORCHRUN,
            run={"compile": True}, default=False),
    _method("ddp-bf16", "DDP + bf16", "DDP + bf16", "handwritten", "dp{n}", SPAWN, precision="bf16"),
    _method("horovod", "Horovod", "Horovod", "horovod", "dp{n}"),
    _method("deepspeed-zero1", "DeepSpeed ZeRO-1", "DeepSpeed ZeRO-1", "deepspeed", "zero1x{n}"),
    _method("deepspeed-zero2", "DeepSpeed ZeRO-2", "DeepSpeed ZeRO-2", "deepspeed", "zero2x{n}"),
    _method("deepspeed-zero3", "DeepSpeed ZeRO-3", "DeepSpeed ZeRO-3", "deepspeed", "fsdp{n}"),
    _method("accelerate-ddp", "Accelerate, DDP", "Accelerate，DDP", "accelerate", "dp{n}"),
    _method("accelerate-fsdp2", "Accelerate, FSDP2", "Accelerate，FSDP2", "accelerate", "fsdp{n}"),
    _method("dp{n}", "samestep dp{n}", "samestep dp{n}", "native", "dp{n}"),
    _method("dp{n}-shared", "samestep dp{n}, one copy", "samestep dp{n}，一份参数", "native", "dp{n}",
            run={"share_replicas": True}, default=False),
    _method("zero1x{n}", "samestep zero1x{n}", "samestep zero1x{n}", "native", "zero1x{n}"),
    _method("zero2x{n}", "samestep zero2x{n}", "samestep zero2x{n}", "native", "zero2x{n}"),
    _method("fsdp{n}", "samestep fsdp{n}", "samestep fsdp{n}", "native", "fsdp{n}"),
    _method("tp{n}", "samestep tp{n}", "samestep tp{n}", "native", "tp{n}"),
    _method("pp{n}", "samestep pp{n}", "samestep pp{n}", "native", "pp{n}"),
    _method("handwritten-single", "plain PyTorch, one process", "手写 PyTorch，单进程", "handwritten", "single",
            HANDWRITTEN, default=False),
    _method("deepspeed-zero0", "DeepSpeed, no ZeRO", "DeepSpeed，不用 ZeRO", "deepspeed", "dp{n}", default=False),
    _method("keras-mirrored", "Keras Mirrored", "Keras Mirrored", "keras-mirrored", "single", default=False),
    _method("keras-multi-worker", "Keras MultiWorkerMirrored", "Keras MultiWorkerMirrored", "keras-multi-worker",
            "dp{n}", default=False),
    _method("keras-parameter-server", "Keras ParameterServer", "Keras ParameterServer", "keras-parameter-server",
            "dp{n}", default=False),
    _method("single-bf16", "one process, bf16", "单进程，bf16", "native", "single", precision="bf16", default=False),
    _method("dp{n}-bf16", "samestep dp{n} + bf16", "samestep dp{n} + bf16", "native", "dp{n}", precision="bf16",
            default=False),
    _method("fsdp{n}-bf16", "samestep fsdp{n} + bf16", "samestep fsdp{n} + bf16", "native", "fsdp{n}",
            precision="bf16", default=False),
)
# fmt: on


def chosen(methods_named: Sequence[str | ComparedMethod] | None, processes: int) -> list[ComparedMethod]:
    """The methods of these names, or those of the published comparison and samestep's layouts.

    A name may also be "engine:layout", such as "native:dp2 tp2", or a method of one's own. Raises UserError for an
    unknown name.
    """
    table = {method.name: method for method in (declared.of(processes) for declared in METHODS)}
    if methods_named is None:
        return [method for method in table.values() if method.default]
    methods: dict[str, ComparedMethod] = {}
    for entry in methods_named:
        name = entry.strip() if isinstance(entry, str) else entry.name
        if name:
            methods[name] = _found(name, processes, table) if isinstance(entry, str) else entry.of(processes)
    if not methods:
        raise UserError('methods names none; use "single, ddp-torchrun, native:dp2 tp2"')
    return list(methods.values())


def _found(name: str, processes: int, table: dict[str, ComparedMethod]) -> ComparedMethod:
    return table.get(name) or _pair(name, processes, table)


def _pair(name: str, processes: int, table: dict[str, ComparedMethod]) -> ComparedMethod:
    """A method written as engine:layout. Raises UserError for one that there isn't."""
    engine, colon, text = name.partition(":")
    if not colon:
        raise UserError(f'unknown method "{name}"; {closest(name, table)}; or a pair engine:layout, {_EXAMPLE}')
    if engine not in (engines := engine_names()):
        raise UserError(f'method "{name}": there is no engine "{engine}"; {closest(engine, engines)}')
    try:
        layout = str(Layout.parse(text, processes if unsized(text) else None))
    except LayoutError as error:
        raise UserError(f'method "{name}": {error}') from None
    title = f"{engine} {layout}"
    return ComparedMethod(name=f"{engine}:{layout}", title=Words(title, title), engine=engine, layout=layout)


_EXAMPLE = 'such as "native:dp2 tp2"'


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published measurement, and our methods that do the same; the fastest of them is shown next to it."""

    name: Words
    minutes: float
    methods: Sequence[str]
    fault: Words | None = None


_TWICE = Words("evaluated every sample twice", "每个样本评估了两次")

# fmt: off
PUBLISHED = (
    Published(name=Words("single GPU", "单 GPU"), minutes=2.83, methods=("single",)),
    Published(name=Words("DataParallel", "DataParallel"), minutes=2.03, methods=("data-parallel",)),
    Published(name=Words("DDP", "DDP"), minutes=1.41, methods=("ddp-torchrun", "ddp-launch")),
    Published(name=Words("DDP by spawn", "DDP，spawn 启动"), minutes=1.49, methods=("ddp-spawn",)),
    Published(name=Words("spawn + AMP", "spawn + AMP"), minutes=0.63, methods=("ddp-bf16",)),
    Published(name=Words("Horovod", "Horovod"), minutes=5.12, methods=("horovod",),
              fault=Words("did not learn, and was slower than one GPU", "没有学到东西，比单 GPU 还慢")),
    Published(name=Words("DeepSpeed", "DeepSpeed"), minutes=1.01, fault=_TWICE,
              methods=("deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3")),
    Published(name=Words("Accelerate", "Accelerate"), minutes=1.37, fault=_TWICE,
              methods=("accelerate-ddp", "accelerate-fsdp2")),
)
# fmt: on
