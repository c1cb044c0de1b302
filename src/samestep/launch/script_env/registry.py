"""The contracts by their engines' names, and how a command line names one: "keras" or "keras:servers=1"."""

from collections.abc import Mapping

from samestep.errors import UserError
from samestep.extras import is_installed
from samestep.launch.script_env import accelerate, deepspeed, horovod, keras, lightning, torch
from samestep.launch.script_env.base import Contract, Expected, Rank
from samestep.ranks import Ranks

CONTRACTS: Mapping[str, Contract] = {
    "torch": torch.CONTRACT,
    "deepspeed": deepspeed.CONTRACT,
    "accelerate": accelerate.CONTRACT,
    "horovod": horovod.CONTRACT,
    "keras": keras.CONTRACT,
    "lightning": lightning.CONTRACT,
}


def check(text: str) -> None:
    """Raise UserError unless the text names an engine with valid options."""
    _read(text)


def check_installed(text: str) -> None:
    """Raise UserError where an engine's package is not installed on this host."""
    contract, _ = _read(text)
    if contract.package is not None and not is_installed(contract.package):
        raise UserError(f"--engine {text}: the package {contract.package} is not installed; {contract.installs}")


def expected(text: str, ranks: Ranks, environ: Mapping[str, str], threads: int) -> Expected:
    """Return what this rank's script expects. Raises UserError if the engine isn't installed."""
    contract, options = _read(text)
    check_installed(text)
    return contract.expected(Rank(ranks=ranks, environ=environ, threads=threads, options=options))


def _read(text: str) -> tuple[Contract, dict[str, str]]:
    name, _, rest = text.partition(":")
    if name not in CONTRACTS:
        raise UserError(f"--engine {text}: it can be {', '.join(CONTRACTS)}")
    contract = CONTRACTS[name]
    options: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        option, equals, value = part.partition("=")
        if option not in contract.options or not equals:
            there = "; ".join(f"{name}=: {says}" for name, says in contract.options.items()) or "none"
            raise UserError(f"--engine {text}: no option {part!r}; the options of {name} are {there}")
        if option in options:
            raise UserError(f"--engine {text}: {option} is given twice; give it once")
        options[option] = value
    contract.check(options)
    return contract, options
