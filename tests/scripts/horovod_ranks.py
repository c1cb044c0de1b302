"""A script of Horovod's, as `horovodrun` starts it. It starts Horovod twice: what ranks meet at has to stay."""

import argparse
import json
import sys

import horovod.torch as hvd  # pyright: ignore[reportMissingImports]
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--times", type=float, required=True)
options = parser.parse_args()

said = {}
for _ in range(2):
    hvd.init()
    total = hvd.allreduce(torch.tensor([options.times * (hvd.rank() + 1)]), op=hvd.Sum)
    said = {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "sum": total.item(),
        "local": [hvd.local_rank(), hvd.local_size()],
        "cross": [hvd.cross_rank(), hvd.cross_size()],
    }
    hvd.shutdown()
sys.stdout.write(json.dumps(said) + "\n")
