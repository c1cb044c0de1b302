"""A manifest of a Kubernetes PyTorchJob that runs a launch: every pod is a host, and runs the same command.

The job is of Kubeflow's training operator, kubeflow.org/v1 (https://www.kubeflow.org/docs/components/trainer/legacy-v1/).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from samestep.errors import UserError
from samestep.visible import DeviceChoice

_NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,51}[a-z0-9])?", re.ASCII)  # pods get "-worker-12" behind it, 63 in all
_CONTAINER = "pytorch"  # the operator looks for this one
_GPU = "nvidia.com/gpu"


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the manifest is to say."""

    name: str
    image: str
    fewest: int  # pods
    most: int
    num_procs: int | None  # ranks of a pod, each with an accelerator; None: as many as it has cores, without
    device: DeviceChoice = "auto"  # cpu: no accelerators
    command: Sequence[str]  # with all its options, as it stands in a pod


def manifest(wish: Wish) -> str:
    """The manifest as YAML. Raises UserError for a name that Kubernetes doesn't take."""
    if not _NAME.fullmatch(wish.name):
        raise UserError(
            f'--job-id "{wish.name}" is no name of a PyTorchJob; up to 53 small letters, digits and dashes are'
        )
    elastic = wish.fewest != wish.most
    ranks = str(wish.num_procs or "auto")
    spec: dict[str, Any] = {"nprocPerNode": ranks, "runPolicy": {"cleanPodPolicy": "Running"}}
    if elastic:
        # Without a master all pods are alike: any but the first may come and go.
        spec["elasticPolicy"] = {"minReplicas": wish.fewest, "maxReplicas": wish.most, "rdzvBackend": "c10d"}
        spec["pytorchReplicaSpecs"] = {"Worker": _replicas(wish, wish.most, "OnFailure")}
    else:
        spec["pytorchReplicaSpecs"] = {"Master": _replicas(wish, 1, "Never")}
        if wish.most > 1:
            spec["pytorchReplicaSpecs"]["Worker"] = _replicas(wish, wish.most - 1, "Never")
    job = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": wish.name}, "spec": spec}
    return yaml.dump(job, Dumper=_Plain, sort_keys=False, allow_unicode=True)


class _Plain(yaml.SafeDumper):
    """Writes what stands in two places twice: people edit a manifest."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _replicas(wish: Wish, number: int, restart: str) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": _CONTAINER,
        "image": wish.image,
        "command": list(wish.command),
        # A pod's own is 64 MB, too small for loaders of data and for NCCL.
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    if wish.num_procs is not None and wish.device != "cpu":
        container["resources"] = {"limits": {_GPU: wish.num_procs}}
    pod = {
        "containers": [container],
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
    }
    return {"replicas": number, "restartPolicy": restart, "template": {"spec": pod}}
