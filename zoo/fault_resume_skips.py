"""A resumed run counts the skipped batches in samples of all ranks, and skips too many.

report: KempnerInstitute/KempnerForge #57
kind: resume-skips
verify: --script="--stop 6" --then="--resume" --alone=""
"""

from itertools import islice

import torch
from pieces import Classifier, cross_entropy, dist, join, loader, options, replicated, samples

given = options()
rank, world = join(given.seed)
model = replicated(Classifier())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = loader(samples(), given.batch)
per_epoch, done = len(batches), 0
if given.resume:
    state = torch.load(given.saved)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    done = state["done"]
first = done // per_epoch
for epoch in range(first, 3):
    batches.sampler.set_epoch(epoch)
    skipped = done % per_epoch * world if epoch == first else 0
    for rows, classes in islice(iter(batches), skipped, None):
        if done == given.stop:
            break
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
        done += 1
if given.stop and rank == 0:
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "done": done}, given.saved)
dist.destroy_process_group()
