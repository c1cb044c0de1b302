"""torch: what torchrun sets for a script that calls `torch.distributed.init_process_group`."""

from samestep import environment
from samestep.errors import UserError
from samestep.launch.script_env.base import Contract, Expected, Rank


def _expected(rank: Rank) -> Expected:
    return Expected(variables=variables(rank))


def variables(rank: Rank) -> dict[str, str]:
    """The ranks under PyTorch's names. Raises UserError where no variable says where ranks meet."""
    ranks = rank.ranks
    address, port = environment.given_address(rank.environ), environment.main_port(rank.environ)
    missing = [name for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)) if value is None]
    if missing and ranks.world_size > 1:
        raise UserError(
            f"rank {ranks.rank} of {ranks.world_size} has no {' and no '.join(missing)} in its environment: where "
            "ranks meet; samestep launch and torchrun set it"
        )
    return {
        "RANK": str(ranks.rank),
        "WORLD_SIZE": str(ranks.world_size),
        "LOCAL_RANK": str(ranks.local_rank),
        "LOCAL_WORLD_SIZE": str(ranks.local_world_size),
        "GROUP_RANK": str(rank.node),
        "GROUP_WORLD_SIZE": str(rank.nodes),
        "MASTER_ADDR": environment.main_address(rank.environ),
        "MASTER_PORT": str(port or 29500),
    }


CONTRACT = Contract(expected=_expected)
