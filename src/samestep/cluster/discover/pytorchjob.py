"""A pod of a PyTorchJob: what Kubeflow's training operator puts into its variables."""

import re

from samestep.cluster.cluster import Cluster, Host
from samestep.cluster.discover.place import Found, Given, Slots, Variables
from samestep.cluster.discover.unnamed import unnamed
from samestep.errors import UserError
from samestep.ranks import in_pytorchjob


class PyTorchJob:
    """Every pod is a host, and runs the same command.

    RANK numbers the pods, and WORLD_SIZE counts ranks where the job says how many a pod has. An elastic job without
    a master has neither; its pods are numbered by their names.
    """

    name = "pytorchjob"
    sign = "MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK in a pod, or PET_RDZV_ENDPOINT and PET_NNODES"
    everywhere = True
    allocates = False

    def named(self, given: Given) -> bool:
        return False

    def there(self, given: Given) -> bool:
        return in_pytorchjob(given.environ) or (_is_elastic(given) and "LOCAL_RANK" not in given.environ)

    def find(self, given: Given) -> Found:
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
        return Found(
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


def _is_elastic(given: Given) -> bool:
    return "PET_RDZV_ENDPOINT" in given.environ and "PET_NNODES" in given.environ


def _endpoint(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()):
        raise UserError(f"PET_RDZV_ENDPOINT is {text!r}; a host and a port such as job-worker-0:23456 are wanted")
    return host, int(port)


def _number_in(pod: str) -> int | None:
    """The number of a worker's pod, such as 2 of job-worker-2."""
    match = re.fullmatch(r".+-worker-(\d{1,6})", pod, re.ASCII)
    return int(match[1]) if match else None


def _processes(read: Variables, given: Given) -> tuple[int, Slots]:
    """Ranks of a pod: as many as the job says, or as it has accelerators or cores, which is torchrun's "auto"."""
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
    """Pods as PET_NNODES counts them; with fewest and most, such as 1:4, the most."""
    text = read.text("PET_NNODES")
    if text is None:
        return None
    numbers = text.split(":")
    if len(numbers) > 2 or not all(number.isascii() and number.isdigit() and int(number) for number in numbers):
        raise UserError(f"PET_NNODES is {text!r}; a number of pods such as 2, or a range such as 1:4, is wanted")
    return int(numbers[-1])
