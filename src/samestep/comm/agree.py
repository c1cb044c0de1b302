"""What ranks tell each other for their hosts to act on: flags and small numbers; no host waits for an accelerator.

Messages here are a few integers, so their cost is that of a wait: they go along with others where that can be.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist


def host_of(group: dist.ProcessGroup, device_type: str) -> torch.device:
    """Where a group's ranks tell each other what the host has to know: on the CPU, where the group can.

    To read what came out of a message on an accelerator, the host would wait until all that was asked of the device
    before is done.
    """
    cpu = torch.device("cpu")
    return cpu if cpu in group._device_types else torch.device(device_type)


def largest(values: Sequence[int], group: dist.ProcessGroup, device_type: str) -> list[int]:
    """The largest of what the ranks give in each place; every rank must ask, for as many."""
    # MAX answers "does any rank ...?" for flags, and "do all say the same?" for a number and its negative: they do
    # where the two largest are each other's negatives.
    message = torch.tensor(values, dtype=torch.int64, device=host_of(group, device_type))
    dist.all_reduce(message, dist.ReduceOp.MAX, group=group)
    return message.tolist()
