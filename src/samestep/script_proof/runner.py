"""A rank's first lines: it installs the recorder, and runs the user's script or module as Python itself would.

`python -m samestep.script_proof.runner [ENGINE'S ARGUMENTS] --recorder=SETTINGS.json SCRIPT.py [ARGUMENTS]`, or
`-m MODULE` in place of the script.
"""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from samestep import environment
from samestep.script_proof.installation import install, leave, recorded
from samestep.script_proof.settings import RECORDER, RecordSettings


def main(arguments: Sequence[str]) -> None:
    """Run the script to its end, or to the last step that is noted. What it raises is raised here too."""
    at = next(index for index, word in enumerate(arguments) if word.startswith(RECORDER))
    engines, command = arguments[:at], arguments[at + 1 :]
    settings = RecordSettings.read(Path(arguments[at].removeprefix(RECORDER)))
    recorder = install(settings)
    with recorded(recorder), environment.given(settings.variables):
        _run(command, engines)


def _run(command: Sequence[str], engines: Sequence[str]) -> None:
    """The command as the main program of this process, with what an engine's launcher puts before its arguments."""
    if command[0] == "-m":
        module, own = command[1], command[2:]
        sys.argv = [module, *engines, *own]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    script, own = command[0], command[1:]
    sys.argv = [script, *engines, *own]
    sys.path[0] = str(Path(script).resolve().parent)
    # It stays __main__ to the end of the process: classes of the script are pickled by that name.
    main_module = ModuleType("__main__")
    vars(main_module).update({"__file__": script, "__builtins__": __builtins__})
    sys.modules["__main__"] = main_module
    exec(compile(Path(script).read_bytes(), script, "exec"), vars(main_module))


if __name__ == "__main__":
    main(sys.argv[1:])
    leave()
