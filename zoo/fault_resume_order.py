"""A resumed run skips the right number of batches, in the order of another epoch.

report: huggingface/accelerate PR 4071
kind: resume-repeats
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
for epoch in range(done // per_epoch, 3):
    batches.sampler.set_epoch(0 if given.resume and epoch == done // per_epoch else epoch)
    skipped = done % per_epoch
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
