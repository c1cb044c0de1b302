"""A script of DeepSpeed's, as the `deepspeed` command starts it: it takes --local_rank."""

import argparse
import json
import os
import sys

import deepspeed  # pyright: ignore[reportMissingImports]
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, required=True)
parser.add_argument("--times", type=float, required=True)
options = parser.parse_args()

# DeepSpeed would compile this extension for its first collective.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
total = torch.tensor([options.times * (deepspeed.comm.get_rank() + 1)])
deepspeed.comm.all_reduce(total)
said = {
    "rank": deepspeed.comm.get_rank(),
    "size": deepspeed.comm.get_world_size(),
    "sum": total.item(),
    "local": [options.local_rank, int(os.environ["LOCAL_SIZE"])],
    "cross": [int(os.environ["CROSS_RANK"]), int(os.environ["CROSS_SIZE"])],
}
sys.stdout.write(json.dumps(said) + "\n")
deepspeed.comm.destroy_process_group()
