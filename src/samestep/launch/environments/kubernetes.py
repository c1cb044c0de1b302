"""Kubernetes: a pod of Kubeflow's PyTorchJob, and the manifest of one that runs a launch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from samestep.errors import UserError
from samestep.launch.environments.base import Cluster, FoundCluster, Host, PlaceInputs, Slots, unnamed
from samestep.launchers import PyTorchJobPod, is_pod, read_pytorchjob
from samestep.ranks import DeviceChoice


class PyTorchJob:
    """The pods of a PyTorchJob, which all run the same command; a pod is a host.

    The pods of an elastic job without a master are numbered by their names.
    """

    name = "pytorchjob"
    sign = "MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK in a pod, or PET_RDZV_ENDPOINT and PET_NNODES"
    everywhere = True
    allocates = False

    def named(self, inputs: PlaceInputs) -> bool:
        return False

    def there(self, inputs: PlaceInputs) -> bool:
        return is_pod(inputs.environ)

    def find(self, inputs: PlaceInputs) -> FoundCluster:
        """The pods of a PyTorchJob as hosts, from what the operator sets in each of them."""
        pod = read_pytorchjob(inputs.environ)
        if pod is None:
            raise UserError(f"a PyTorchJob's variables are wanted: {self.sign}")
        slots, counted = _slots(pod, inputs)
        pods = pod.pods
        if pods is None and pod.world_size is not None:
            pods = pod.world_size // slots if counted == "listed" else pod.world_size
        if pods is None:
            raise UserError("PET_NNODES is empty; a number of pods such as 2, or a range such as 1:4, is wanted")
        this = _number_in(inputs.host.name) if pod.number is None else pod.number
        if this is not None and this >= pods:
            name = pod.numbered_by
            raise UserError(f"{name} is {this}, and the job has {pods} pods, counted from 0; the operator sets both")
        names = unnamed(pods, this, inputs.host.name)
        names[0] = pod.main_address
        return FoundCluster(
            cluster=Cluster(
                place=self.name,
                hosts=tuple(Host(name=name, slots=slots) for name in names),
                this=this,
                job=pod.job,
            ),
            read=pod.read,
            slots_from=counted,
            on_every_host=True,
            main_address=pod.main_address,
            main_port=pod.main_port,
        )


def _number_in(pod: str) -> int | None:
    """Return the number in a worker pod's name, such as 2 of job-worker-2; None for any other name."""
    match = re.fullmatch(r".+-worker-(\d{1,6})", pod, re.ASCII)
    return int(match[1]) if match else None


def _slots(pod: PyTorchJobPod, inputs: PlaceInputs) -> tuple[int, Slots]:
    """Return a pod's number of ranks: as the job says, else its accelerators or cores (torchrun's "auto")."""
    own = inputs.host
    if isinstance(pod.processes, int):
        return pod.processes, "listed"
    if pod.processes == "gpu":
        if not own.accelerators:
            raise UserError("PET_NPROC_PER_NODE is 'gpu', and this pod has no accelerator that PyTorch can use")
        return own.accelerators, "accelerators"
    if pod.processes == "cpu":
        return own.cores, "cores"
    return inputs.slots


_NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,51}[a-z0-9])?", re.ASCII)  # pods append "-worker-12"; 63 characters in all
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*", re.ASCII)  # host, port, path, tag and digest
_CONTAINER = "pytorch"  # the container name that the operator looks for
_GPU = "nvidia.com/gpu"


@dataclass(frozen=True, kw_only=True)
class PyTorchJobSpec:
    """What the manifest of a PyTorchJob is made from."""

    name: str
    image: str
    fewest: int  # pods
    most: int
    num_procs: int | None  # ranks and accelerators of a pod; None: a rank a core, without accelerators
    device: DeviceChoice = "auto"  # cpu: no accelerators
    command: Sequence[str]  # with all options, as run in a pod


def manifest(wish: PyTorchJobSpec) -> str:
    """Build the manifest as YAML. Raises UserError for a name or an image that Kubernetes doesn't accept."""
    if not _NAME.fullmatch(wish.name):
        raise UserError(
            f'--job-id "{wish.name}" is no name of a PyTorchJob; up to 53 small letters, digits and dashes are'
        )
    if not _IMAGE.fullmatch(wish.image):
        raise UserError(f'--image "{wish.image[:80]}" is no image; write such as registry.example/team/name:tag')
    elastic = wish.fewest != wish.most
    ranks = str(wish.num_procs or "auto")
    spec: dict[str, Any] = {"nprocPerNode": ranks, "runPolicy": {"cleanPodPolicy": "Running"}}
    if elastic:
        # Without a master all pods are workers: any but the first may come and go.
        spec["elasticPolicy"] = {"minReplicas": wish.fewest, "maxReplicas": wish.most, "rdzvBackend": "c10d"}
        spec["pytorchReplicaSpecs"] = {"Worker": _replicas(wish, wish.most, "OnFailure")}
    else:
        spec["pytorchReplicaSpecs"] = {"Master": _replicas(wish, 1, "Never")}
        if wish.most > 1:
            spec["pytorchReplicaSpecs"]["Worker"] = _replicas(wish, wish.most - 1, "Never")
    job = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": wish.name}, "spec": spec}
    return yaml.dump(job, Dumper=_Plain, sort_keys=False, allow_unicode=True)


class _Plain(yaml.SafeDumper):
    """YAML dumper without anchors and aliases, since people edit a manifest."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _replicas(wish: PyTorchJobSpec, number: int, restart: str) -> dict[str, Any]:
    """Build the replica specification of one kind of pod."""
    container: dict[str, Any] = {
        "name": _CONTAINER,
        "image": wish.image,
        "command": list(wish.command),
        # The default /dev/shm has 64 MB, too small for data loaders and NCCL.
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    if wish.num_procs is not None and wish.device != "cpu":
        container["resources"] = {"limits": {_GPU: wish.num_procs}}
    pod = {
        "containers": [container],
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
    }
    return {"replicas": number, "restartPolicy": restart, "template": {"spec": pod}}
