"""A script of PyTorch's own, as torchrun starts it."""

import argparse
import json
import os
import sys

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--times", type=float, required=True)
options = parser.parse_args()

dist.init_process_group("gloo")
total = torch.tensor([options.times * (dist.get_rank() + 1)])
dist.all_reduce(total)
said = {
    "rank": dist.get_rank(),
    "size": dist.get_world_size(),
    "sum": total.item(),
    "local": [int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])],
    "threads": torch.get_num_threads(),
    "processors": sorted(os.sched_getaffinity(0)),
    "tf_config": json.loads(os.environ.get("TF_CONFIG", "null")),
}
sys.stdout.write(json.dumps(said) + "\n")
dist.destroy_process_group()
