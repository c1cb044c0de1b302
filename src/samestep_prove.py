"""The prover in a test: `from samestep_prove import assert_same_step`, then `assert_same_step("train.py")`.

As a program, `python -m samestep_prove FILE FUNCTION`, it calls a function of a file: a rank of a function's proof.
"""

import importlib
import importlib.util
import inspect
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samestep.script_proof.compare import Verdict
    from samestep.spot_checks.callbacks import lightning_callback, trainer_callback
    from samestep.spot_checks.recorder import SpotChecks

__all__ = ["SpotChecks", "assert_same_step", "lightning_callback", "trainer_callback"]

_OF_SPOT_CHECKS = {
    "SpotChecks": "recorder",
    "lightning_callback": "callbacks",
    "trainer_callback": "callbacks",
}


def __getattr__(name: str) -> Any:
    """Import what records a real training when it is asked for: it needs PyTorch, which a proof's parent does not."""
    if name not in _OF_SPOT_CHECKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"samestep.spot_checks.{_OF_SPOT_CHECKS[name]}"), name)


def assert_same_step(
    script: str | Callable[[], Any],
    *,
    processes: int = 2,
    steps: int = 3,
    alone: str | None = None,
    seed: int | None = None,
    on: str | None = None,
    tiny: bool = False,
    time_limit: float = 120.0,
) -> "Verdict":
    """Prove a script, or a function of a module that trains, on the CPU; the verdict if it is the same step.

    Args:
        script: a command such as `"train.py --batch-size 16"`, or a function without arguments that is one rank.
        processes: ranks of the split run.
        steps: of the optimizer, that are compared.
        alone: the command for one process, where it has other arguments.
        seed: of random numbers, before the script begins.
        on: `"cpu"` for a script that names an accelerator.
        tiny: whether models of transformers are made with two layers.
        time_limit: seconds of one run.

    Raises:
        AssertionError: with the first difference, and the line that it is about.
        samestep.errors.UserError: where a run fails, or can't be compared.
    """
    from samestep.script_proof.annotations import place_of
    from samestep.script_proof.compare import prove
    from samestep.script_proof.forked import forking
    from samestep.script_proof.runs import ScriptProof, words
    from samestep.script_proof.torchrun import by_torchrun

    __tracebackhide__ = True  # pytest shows the line of the test
    proof = ScriptProof(
        script=words("script", script) if isinstance(script, str) else _command(script),
        alone=words("alone", alone) if alone is not None else None,
        processes=processes,
        device="cpu",
        on=on,
        tiny=tiny,
        steps=steps,
        seed=seed,
        time_limit=time_limit,
    )
    with tempfile.TemporaryDirectory(prefix="samestep-script-") as scratch:
        folder = Path(scratch) / "runs"
        with forking(proof, by_torchrun) as starter:
            verdict = prove(proof, folder, starter)
        place = place_of(verdict.finding, folder) if verdict.finding is not None else None
    if verdict.finding is not None:
        where = f"{place[0]}:{place[1]}: " if place is not None else ""
        raise AssertionError(f"{where}not the same step: {verdict.finding.line}")
    return verdict


def _command(function: Callable[[], Any]) -> tuple[str, ...]:
    """The command that calls a function. Raises UserError for one that another process can't find."""
    from samestep.errors import UserError

    file = inspect.getsourcefile(function)
    name = getattr(function, "__qualname__", "")
    if file is None or not name.isidentifier():
        raise UserError(f"{function!r} is no function of a module's own, which a rank could import; define it there")
    return ("-m", "samestep_prove", str(Path(file).resolve()), name)


def _main(file: str, name: str) -> None:
    path = Path(file)
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{shlex.quote(file)} is no module of Python's")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    getattr(module, name)()


if __name__ == "__main__":
    _main(*sys.argv[1:])
