"""horovod: what `horovodrun --gloo` sets, with a server for its ranks that lives as long as rank 0."""

from samestep.cluster.contracts import torch
from samestep.cluster.contracts.base import Contract, Expected, Rank


def _expected(rank: Rank) -> Expected:
    return Expected(variables=torch.variables(rank))


CONTRACT = Contract(expected=_expected, package="horovod", installs="make horovod would do")
