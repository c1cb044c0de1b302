"""Imported by the server that the table's processes are forked from: the models, and what a first step imports."""

import torch

from model_table import zoo

torch.set_num_threads(1)  # a process with threads can't be forked
with torch.device("meta"):
    for _entry in zoo.entries().values():
        if _entry.loss is None and _entry.half == "chosen":
            _entry.model()
