"""accelerate: what `accelerate launch` sets, from the user's `accelerate config` file where there is one."""

from samestep.cluster.contracts import torch
from samestep.cluster.contracts.base import Contract, Expected, Rank


def _expected(rank: Rank) -> Expected:
    return Expected(variables=torch.variables(rank))


CONTRACT = Contract(expected=_expected)
