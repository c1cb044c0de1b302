"""The time of offload: copies between a device and its host's memory, and the optimizer's step on the host.

Copies of activations go in the order of the device's work, so nothing hides them; a step's gradients go down when
they are whole, the host steps, and the parameters come back (Ren et al., arXiv 2101.06840, section 4, not delayed).
"""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from samestep.layout import Layout
from samestep.planning.hardware import HOST_EFFICIENCY, HOSTS, LINKS, Cluster
from samestep.planning.memory import held_parameters, kept_activations
from samestep.planning.pipeline_events import SPLIT_BACKWARD
from samestep.planning.stage_time import Job

_STEPPED_BYTES = 32.0  # a parameter that Adam reads and writes: three numbers of 4 bytes each way, gradient, result


def offloads_of(layout: Layout) -> Iterator[Layout]:
    """The layout with what it can move to the host: activations, or with recomputed ones the optimizer as well."""
    if layout.schedule in SPLIT_BACKWARD:
        return
    if layout.recompute == "none":
        yield replace(layout, offload="activations")
    elif layout.recompute == "full":
        yield replace(layout, offload="optimizer")
        yield replace(layout, offload="activations+optimizer")
        if layout.zero == 3:  # ZeRO-2 holds all parameters from forward to backward
            yield replace(layout, offload="activations+parameters")


def offload_seconds(job: Job, layout: Layout, micro_batch: int, micro_batches: int, cluster: Cluster) -> float:
    """Seconds of a step that a rank spends on what is kept in its host's memory."""
    if layout.offload == "none":
        return 0.0
    host = HOSTS[cluster.device.kind]
    link = HOST_EFFICIENCY * LINKS[host.link].rate
    layers = ceil(job.model.layers / layout.pipeline)
    seconds = 0.0
    if layout.offloads("activations"):
        kept = layers * kept_activations(job.model, micro_batch, layout, job.software, job.precision)
        seconds += micro_batches * 2 * kept / link
    if layout.offloads("optimizer") or layout.offloads_parameters:
        shared, experts = held_parameters(job.model, layout, layers, first=True, last=layout.pipeline == 1)
        owned = shared / (layout.shard * layout.expert if layout.zero else 1)
        owned += experts / (layout.shard if layout.zero else 1)
        trained = owned * job.model.trained
        seconds += trained * (job.software.kept_gradient_bytes + 2.0) / link
        seconds += trained * _STEPPED_BYTES / (HOST_EFFICIENCY * host.bandwidth)
        if layout.offloads_parameters:  # shards come up for each forward and each backward
            seconds += micro_batches * 2 * 2.0 * owned / link
    return seconds
