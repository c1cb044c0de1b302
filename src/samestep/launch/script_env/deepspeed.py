"""deepspeed: what the `deepspeed` command sets, and the argument --local_rank that it gives to a script."""

from collections.abc import Mapping

from samestep.errors import UserError
from samestep.launch.script_env import torch
from samestep.launch.script_env.base import Contract, Expected, Rank


def _expected(rank: Rank) -> Expected:
    """Return torchrun's variables with DeepSpeed's further names, and --local_rank for the script."""
    local_rank = rank.ranks.local_rank
    variables = {
        **torch.variables(rank),
        "LOCAL_SIZE": str(rank.ranks.local_world_size),
        "CROSS_RANK": str(rank.node),
        "CROSS_SIZE": str(rank.nodes),
    }
    passed = rank.options.get("local-rank", "yes") == "yes"
    return Expected(variables=variables, arguments=(f"--local_rank={local_rank}",) if passed else ())


def _check(options: Mapping[str, str]) -> None:
    value = options.get("local-rank", "yes")
    if value not in ("yes", "no"):
        raise UserError(f"--engine: local-rank={value}; it can be yes or no")


CONTRACT = Contract(
    expected=_expected,
    options={"local-rank": "no: the script takes no argument --local_rank (as deepspeed --no_local_rank)"},
    check=_check,
)
