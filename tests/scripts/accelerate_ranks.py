"""A script of Accelerate's, as `accelerate launch` starts it: what the user configured comes from outside."""

import argparse
import json
import sys

import torch
from accelerate import Accelerator  # pyright: ignore[reportMissingImports]

parser = argparse.ArgumentParser()
parser.add_argument("--times", type=float, required=True)
options = parser.parse_args()

accelerator = Accelerator()
total: torch.Tensor = accelerator.reduce(torch.tensor([options.times * (accelerator.process_index + 1)]))  # pyright: ignore
said = {
    "rank": accelerator.process_index,
    "size": accelerator.num_processes,
    "sum": total.item(),
    "local": [accelerator.local_process_index, 2],
    "precision": accelerator.mixed_precision,
    "accumulation": accelerator.gradient_accumulation_steps,
}
sys.stdout.write(json.dumps(said) + "\n")
accelerator.end_training()
