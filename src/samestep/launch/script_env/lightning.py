"""lightning: what `fabric run` sets, and the like for the Trainer, which reads its arguments from the environment.

Without it a script that names no devices takes one, and on hosts without accelerators each rank trains by itself.
"""

from samestep.launch.script_env import torch
from samestep.launch.script_env.base import Contract, Expected, Rank


def _expected(rank: Rank) -> Expected:
    """Variables from which Lightning's Trainer and Fabric take their arguments."""
    from samestep.launch.device import accelerators

    ranks = rank.ranks
    settings = {
        "DEVICES": str(ranks.local_world_size),
        "NUM_NODES": str(ranks.world_size // ranks.local_world_size),
        **({} if accelerators() else {"ACCELERATOR": "cpu"}),
    }
    variables = {f"{reader}_{name}": value for name, value in settings.items() for reader in _READERS}
    if ranks.world_size > 1:
        variables["LT_STRATEGY"] = "ddp"
    unset = {name: value for name, value in variables.items() if name not in rank.environ}
    return Expected(variables={**torch.variables(rank), **unset, "LT_CLI_USED": "1"})


_READERS = ("LT", "PL_TRAINER")  # Fabric, and the Trainer

CONTRACT = Contract(expected=_expected)
