"""Places as tests make them: a machine with given parts, and variables as each launcher's documentation has them."""

from collections.abc import Mapping
from typing import Any

import pytest

from samestep.errors import UserError
from samestep.launch.environments.base import FoundCluster, OwnHost, PlaceInputs
from samestep.launch.environments.registry import find


class Here(OwnHost):
    """A machine with these parts, whatever the one of the test has."""

    def __init__(self, name: str = "login-1", accelerators: int = 0, cores: int = 8) -> None:
        self._parts = (name, accelerators, cores)

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._parts[0]

    @property
    def accelerators(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._parts[1]

    @property
    def cores(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._parts[2]


def at(
    environ: Mapping[str, str], place: str | None = None, host: OwnHost | None = None, **given: Any
) -> FoundCluster:
    return find(PlaceInputs(environ=environ, host=host or Here(), **given), place)


def slots(found: FoundCluster) -> dict[str, int]:
    return {host.name: host.slots for host in found.cluster.hosts}


def read(found: FoundCluster) -> dict[str, str]:
    return {each.source: each.value for each in found.read}


def refused(environ: Mapping[str, str], **given: Any) -> str:
    with pytest.raises(UserError) as error:
        at(environ, **given)
    return str(error.value)


# A batch script on the first of three nodes, of which the job asked for 5 tasks.
BATCH = {
    "SLURM_JOB_ID": "200505",
    "SLURM_JOB_NODELIST": "gpu[01-03]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_JOB_CPUS_PER_NODE": "72(x2),36",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_NTASKS": "5",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_CPUS_ON_NODE": "72",
}


# From IBM's list of the variables that LSF sets for a job.
LSF = {
    "LSB_JOBID": "4711",
    "LSB_HOSTS": "host-a host-a host-b",
    "LSB_MCPU_HOSTS": "host-a 2 host-b 1",
    "LSB_DJOB_NUMPROC": "3",
}


OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_UNIVERSE_SIZE": "4",
    "PMIX_NAMESPACE": "1834352641",
    "OMPI_MCA_orte_hnp_uri": "1834352640.0;tcp://10.0.0.5:37865;tcp6://[fd00::5]:56449",
}


# From the documentation of its training toolkit.
SAGEMAKER = {
    "SM_HOSTS": '["algo-1","algo-2"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_NUM_GPUS": "0",
    "SM_NUM_CPUS": "32",
    "SM_NETWORK_INTERFACE_NAME": "ethwe",
    "SM_RESOURCE_CONFIG": '{"current_host":"algo-2","hosts":["algo-1","algo-2"],"network_interface_name":"ethwe"}',
    "SAGEMAKER_JOB_NAME": "reviews-2026-11-21",
}


# From the code of Kubeflow's training operator.
PYTORCHJOB = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "MASTER_ADDR": "reviews-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "8",
    "RANK": "1",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_NNODES": "2",
}


TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "worker-1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
