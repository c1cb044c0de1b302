"""accelerate: what `accelerate launch` sets, from the user's `accelerate config` file where there is one."""

import logging
import warnings
from pathlib import Path
from typing import Any

from samestep import environment, private_folders
from samestep.errors import UserError
from samestep.launch.script_env import torch
from samestep.launch.script_env.base import Contract, Expected, Rank

# Settings of torchrun in `accelerate launch`, which the rank has already.
_NOT_THE_SCRIPTS = {"MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"}


def _expected(rank: Rank) -> Expected:
    """Return torchrun's variables, and Accelerate's own from its configuration file, if there is one."""
    ranks = torch.variables(rank)
    config = rank.options.get("config")
    file = Path(config) if config else environment.accelerate_config(rank.environ)
    if config and not file.is_file():
        raise UserError(f"--engine accelerate:config={config}: there is no such file in {Path.cwd()}")
    if not file.is_file():
        return Expected(variables={**ranks, **_by_default(rank)})
    if not config:
        _check_default(file)
    return Expected(variables={**_of_file(file, rank), **ranks})


def _check_default(file: Path) -> None:
    """Raise UserError for a file that the user has not named, and into which another user could write."""
    try:
        private_folders.check(file)
    except private_folders.NotPrivateError as error:
        instead = f"name the file by --engine accelerate:config={file}"
        raise UserError(
            f"Accelerate's default configuration {file} decides how the script is started, and isn't read: "
            f"{error.advising(instead)}"
        ) from None


def _by_default(rank: Rank) -> dict[str, str]:
    """Set ACCELERATE_USE_CPU without accelerators, as `accelerate launch --cpu`: else each rank would be alone."""
    from samestep.launch.device import accelerators

    return {} if "ACCELERATE_USE_CPU" in rank.environ or accelerators() else {"ACCELERATE_USE_CPU": "true"}


def _of_file(file: Path, rank: Rank) -> dict[str, str]:
    """Derive the variables from a file with Accelerate's own launcher. Raises UserError with its message."""
    # It warns about each omitted option and a missing GPU.
    logging.disable(logging.WARNING)
    try:
        with environment.given({}), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            prepared = _prepared(str(file), rank.ranks.world_size)
    except Exception as error:  # from its parser, or any of many for a key or a value
        raise UserError(f"{file}: Accelerate can't launch from it: {error}") from None
    finally:
        logging.disable(logging.NOTSET)
    return {
        name: value
        for name, value in prepared.items()
        if rank.environ.get(name) != value and name not in _NOT_THE_SCRIPTS
    }


def _prepared(file: str, ranks: int) -> dict[str, str]:
    """Return the environment of `accelerate launch --config_file`, with this job's number of ranks."""
    from accelerate.commands import launch  # pyright: ignore[reportMissingImports]
    from accelerate.utils import launch as prepare  # pyright: ignore[reportMissingImports]

    words = ["--config_file", file, "--num_processes", str(ranks), "--num_machines", "1", "--main_process_port", "0"]
    options: Any
    defaults: Any
    options, defaults, from_file = launch._validate_launch_command(
        launch.launch_command_parser().parse_args([*words, "script.py"])
    )
    if options.use_deepspeed:
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if from_file else [])]
        options.deepspeed_fields_from_accelerate_config = ",".join(fields)
        return prepare.prepare_deepspeed_cmd_env(options)[1]
    if options.use_fsdp or options.use_megatron_lm or options.multi_gpu:
        return prepare.prepare_multi_gpu_env(options)
    return prepare.prepare_simple_launcher_cmd_env(options)[1]


CONTRACT = Contract(
    expected=_expected,
    options={"config": "a file of `accelerate config`; its default one where that exists"},
    package="accelerate",
    installs='use pip install "samestep[accelerate]"',
)
