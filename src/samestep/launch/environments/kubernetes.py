"""Kubernetes: a pod of Kubeflow's PyTorchJob, and the manifest of one that runs a launch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from samestep.errors import UserError
from samestep.launch.environments.base import Cluster, FoundCluster, Host, PlaceInputs, Slots, unnamed
from samestep.ranks import DeviceChoice, Variables, in_pytorchjob


class PyTorchJob:
    """The pods of a PyTorchJob, which all run the same command; a pod is a host.

    RANK numbers the pods, and WORLD_SIZE counts ranks where the job says how many a pod has. An elastic job without
    a master has neither; its pods are numbered by their names.
    """

    name = "pytorchjob"
    sign = "MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK in a pod, or PET_RDZV_ENDPOINT and PET_NNODES"
    everywhere = True
    allocates = False

    def named(self, given: PlaceInputs) -> bool:
        return False

    def there(self, given: PlaceInputs) -> bool:
        return in_pytorchjob(given.environ) or (_is_elastic(given) and "LOCAL_RANK" not in given.environ)

    def find(self, given: PlaceInputs) -> FoundCluster:
        """The pods of a PyTorchJob as hosts, from what the operator sets in each of them.

        An elastic job has PET_* variables and a rendezvous endpoint; a plain one MASTER_ADDR and a rank for each pod.
        """
        read = Variables(given.environ)
        slots, counted = _processes(read, given)
        pods = _pods(read)
        if _is_elastic(given) and "MASTER_ADDR" not in given.environ:
            address, port = _endpoint(read.wanted("PET_RDZV_ENDPOINT", "a host and a port"))
            name, this = "the number in this pod's name", _number_in(given.host.name)
        else:
            address, port = read.wanted("MASTER_ADDR", "the first pod's name"), read.needed("MASTER_PORT", 1)
            world_size = read.needed("WORLD_SIZE", 1)
            pods = pods or (world_size // slots if counted == "listed" else world_size)
            name = "PET_NODE_RANK" if read.text("PET_NODE_RANK") else "RANK"
            this = read.needed(name)
        if pods is None:
            raise UserError("PET_NNODES is not set; a number of pods such as 2, or a range such as 1:4, is wanted")
        if this is not None and this >= pods:
            raise UserError(f"{name} is {this}, and the job has {pods} pods, counted from 0; the operator sets both")
        names = unnamed(pods, this, given.host.name)
        names[0] = address
        return FoundCluster(
            cluster=Cluster(
                place=self.name,
                hosts=tuple(Host(name=name, slots=slots) for name in names),
                this=this,
                job=read.text("PET_RDZV_ID") or address,
            ),
            read=read.read(),
            slots_from=counted,
            on_every_host=True,
            main_address=address,
            main_port=port,
        )


def _is_elastic(given: PlaceInputs) -> bool:
    return "PET_RDZV_ENDPOINT" in given.environ and "PET_NNODES" in given.environ


def _endpoint(text: str) -> tuple[str, int]:
    """Split PET_RDZV_ENDPOINT into host and port."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()):
        raise UserError(f"PET_RDZV_ENDPOINT is {text!r}; a host and a port such as job-worker-0:23456 are wanted")
    return host, int(port)


def _number_in(pod: str) -> int | None:
    """Return the number in a worker pod's name, such as 2 of job-worker-2; None for any other name."""
    match = re.fullmatch(r".+-worker-(\d{1,6})", pod, re.ASCII)
    return int(match[1]) if match else None


def _processes(read: Variables, given: PlaceInputs) -> tuple[int, Slots]:
    """Return a pod's number of ranks: as the job says, else its accelerators or cores (torchrun's "auto")."""
    text = read.text("PET_NPROC_PER_NODE")
    own = given.host
    if text is None or text == "auto":
        return given.slots
    if text == "gpu":
        if not own.accelerators:
            raise UserError("PET_NPROC_PER_NODE is 'gpu', and this pod has no accelerator that PyTorch can use")
        return own.accelerators, "accelerators"
    if text == "cpu":
        return own.cores, "cores"
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise UserError(f"PET_NPROC_PER_NODE is {text!r}; a number of 1 or more, auto, gpu or cpu is wanted")
    return int(text), "listed"


def _pods(read: Variables) -> int | None:
    """Parse PET_NNODES; of a range such as 1:4, the maximum."""
    text = read.text("PET_NNODES")
    if text is None:
        return None
    numbers = text.split(":")
    if len(numbers) > 2 or not all(number.isascii() and number.isdigit() and int(number) for number in numbers):
        raise UserError(f"PET_NNODES is {text!r}; a number of pods such as 2, or a range such as 1:4, is wanted")
    return int(numbers[-1])


_NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,51}[a-z0-9])?", re.ASCII)  # pods append "-worker-12"; 63 characters in all
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
    """Build the manifest as YAML. Raises UserError for a name that Kubernetes doesn't accept."""
    if not _NAME.fullmatch(wish.name):
        raise UserError(
            f'--job-id "{wish.name}" is no name of a PyTorchJob; up to 53 small letters, digits and dashes are'
        )
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
