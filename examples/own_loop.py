"""A loop of one's own: `python own_loop.py` for one process, `torchrun --nproc-per-node=2 own_loop.py` for two."""

import torch
from own_task import Spirals
from torch import nn

import samestep

task = Spirals()
torch.manual_seed(0)  # the same initial weights on every rank
model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

with samestep.session(layout="ddp", clip=1.0) as session:
    model, optimizer = session.prepare(model, optimizer)
    for batch in session.batches(task.train_set(), batch=64, epochs=10, collate=task.collate):
        report = session.step(batch, task.loss)
        if session.is_main and batch.step % 100 == 0:
            print(f"step {batch.step}: loss {report.loss:.4f}")
    metrics = session.evaluate(task.eval_set(), collate=task.collate, metrics=task.metrics())
    if session.is_main:
        print(f"accuracy {metrics['accuracy']:.3f}")
