"""Leave the process group without the deadlock that waits there for gloo's threads.

A thread of gloo lets go of a finished message with the group's lock held, and where the message's tensors came from
Python, it needs Python's lock for it. The group's end takes Python's lock first and then the group's, so the two may
wait for each other for ever. (Seen in PyTorch 2.13, once in some thirty ends of a busy machine.)
"""

import torch.distributed as dist


def leave_process_group() -> None:
    """End the process group and all that were made of it, once every rank is there.

    Every group sends one more message, which holds on to those before it, and this function holds on to that message:
    so nothing is left of which a thread of gloo would have to let go.
    """
    groups = [group for group in dist.distributed_c10d._world.pg_map if dist.get_backend(group) == "gloo"]
    last = [dist.barrier(group, async_op=True) for group in groups]
    for work in last:
        if work is not None:
            work.wait()
    dist.destroy_process_group()
    del last  # after the groups, whose threads are gone by now
