"""Translates a command of torchrun or torch.distributed.launch to a job."""

import io
import re
import shlex
from argparse import Namespace
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from samestep.errors import UserError
from samestep.limits import MOST_RANKS, MOST_RANKS_A_HOST, MOST_THREADS, read_whole, whole_of
from samestep.translate.base import ConfigReader, Draft, GivenSizes, Sizes

_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)

_REASONS = {
    "max_restarts": "torchrun restarts its ranks just so around samestep",
    "log_dir": "torchrun writes its logs just so around samestep",
}
_OTHERWISE = "stays torchrun's: torchrun ... -m samestep train JOB.yaml"
# Options for the script and the kind of launch, which other remarks cover.
_SCRIPT = ("training_script", "training_script_args", "module", "no_python", "run_path", "use_env")


class ReadTorchrun(ConfigReader):
    """Translates a torchrun command to a job."""

    title = "a torchrun command"

    def recognises(self, content: Any) -> bool:
        return isinstance(content, str) and calls_launcher(content)

    def read(self, content: Any, user_sizes: GivenSizes) -> Draft:
        if not isinstance(content, str):
            raise UserError("a command of words is wanted, such as torchrun --nproc-per-node=2 train.py")
        lines = _lines(content)
        launches = [line for line in lines if _is_launch(line)]
        if len(launches) != 1:
            raise UserError(f"{len(launches)} lines call {' or '.join(_LAUNCHERS)}; one is wanted")
        draft = Draft()
        for line in lines:
            if line is not launches[0]:
                draft.remark(" ".join(line), None, "another command, passed over")
        words = _variables(launches[0], draft)
        options, plain = _parse(words)
        processes = _processes(options, draft)
        if processes and user_sizes.processes not in (None, processes):
            raise UserError(f"the command starts {processes} ranks, and --processes says {user_sizes.processes}")
        draft.set_layout(
            Sizes(data=user_sizes.processes or processes), "replicas, as DistributedDataParallel has them"
        )
        if user_sizes.batch:
            draft.set("recipe.batch", user_sizes.batch)
        for name, value in vars(options).items():
            if name not in (*_SCRIPT, "nnodes", "nproc_per_node") and value != getattr(plain, name):
                draft.remark(f"--{name.replace('_', '-')}", value, _REASONS.get(name, _OTHERWISE))
        script = shlex.join([options.training_script, *options.training_script_args])
        draft.remark(script, None, "the script's model, data and arguments go into a task and its recipe")
        return draft


def calls_launcher(text: str) -> bool:
    """Whether a command in a text is one of PyTorch's launchers."""
    return any(_is_launch(line) for line in _lines(text))


def _lines(text: str) -> list[list[str]]:
    """The words of each command in a text; a line that ends in a backslash continues on the next."""
    try:
        split = (shlex.split(line, comments=True) for line in re.sub(r"\\\r?\n", " ", text).splitlines())
        return [words for words in split if words]
    except ValueError:  # an unclosed quote
        return []


def _is_launch(words: Sequence[str]) -> bool:
    return any(word.rpartition("/")[2] in _LAUNCHERS for word in words)


def _variables(words: Sequence[str], draft: Draft) -> list[str]:
    """The launcher's arguments. Reads the environment variables before it, and ignores all other words there."""
    start = next(index for index, word in enumerate(words) if word.rpartition("/")[2] in _LAUNCHERS)
    for word in words[:start]:
        match = _VARIABLE.fullmatch(word)
        if match and match[1] == "OMP_NUM_THREADS":
            draft.set("run.threads", whole_of(match[2], "OMP_NUM_THREADS", 1, MOST_THREADS))
        elif match:
            draft.remark(word, None, "set it just so before samestep")
    return list(words[start + 1 :])


def _parse(words: Sequence[str]) -> tuple[Namespace, Namespace]:
    """Parse the arguments with PyTorch's own parser; returns them, and those of a command with only a script."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.add_argument("--use-env", "--use_env", action="store_true")  # torch.distributed.launch has it
    errors = io.StringIO()
    try:
        with redirect_stderr(errors), redirect_stdout(io.StringIO()):
            return parser.parse_args(list(words)), parser.parse_args(["script.py"])
    except SystemExit:  # argparse exits on errors
        message = errors.getvalue().strip().rpartition(": error: ")[2]
        raise UserError(f"torchrun: {message or 'these words start nothing'}") from None


def _processes(options: Namespace, draft: Draft) -> int | None:
    """The number of ranks; None if it is only known on the machines."""
    hosts, a_host = str(options.nnodes), str(options.nproc_per_node)
    first, _, last = hosts.partition(":")
    least, most = (read_whole(word) or 0 for word in (first, last or first))
    if not 1 <= least <= most <= MOST_RANKS:
        raise UserError(
            f"--nnodes is {hosts}; use a number such as 2, or a range such as 1:4, of at most {MOST_RANKS:,}"
        )
    if most != least:
        draft.remark("--nnodes", hosts, "the layout takes the ranks that are there when it starts")
        return None
    if a_host in ("auto", "gpu", "cpu", "xpu"):
        draft.remark("--nproc-per-node", a_host, "the layout takes the ranks that torchrun starts")
        return None
    ranks = read_whole(a_host) or 0
    if not 1 <= ranks <= MOST_RANKS_A_HOST:
        raise UserError(
            f"--nproc-per-node is {a_host}; use a number such as 2, {MOST_RANKS_A_HOST} at most, or auto, cpu or gpu"
        )
    return least * ranks
