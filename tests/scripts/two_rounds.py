"""A rank that leaves a word in its round's store, and in the first round fails on rank 1."""

import os
import sys

import torch.distributed as dist

dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
number, rank = os.environ["SAMESTEP_ROUND"], dist.get_rank()
dist.barrier()
found = store.check(["left by an earlier round"])
dist.barrier()
store.set("left by an earlier round", "yes")
print(f"round {number} port {os.environ['MASTER_PORT']} restart {os.environ['TORCHELASTIC_RESTART_COUNT']} {found}")
sys.stdout.flush()
dist.barrier()
if number == "0" and rank == 1:
    os._exit(3)
dist.barrier()
dist.destroy_process_group()
