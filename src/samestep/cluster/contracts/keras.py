"""keras: TF_CONFIG, from which TensorFlow's strategies of several workers know each other."""

from samestep.cluster.contracts import torch
from samestep.cluster.contracts.base import Contract, Expected, Rank


def _expected(rank: Rank) -> Expected:
    return Expected(variables=torch.variables(rank))


CONTRACT = Contract(expected=_expected)
