"""torchrun --standalone --nproc-per-node=2 deepspeed_after.py"""

import torch
from small import loss, net, points, tell
from torch.utils.data import default_collate

import samestep


def collate(rows):
    return samestep.Batch(*default_collate(rows))


def summed(output, batch):
    count = len(output)
    return loss(output, batch.targets) * count, count


model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with samestep.session(layout="zero2x2", clip=1.0) as session:
    model, optimizer = session.prepare(model, optimizer)
    batches = session.batches(
        points(),
        batch=32,
        epochs=10,
        collate=collate,
    )
    for batch in batches:
        session.step(batch, summed)
    tell(model)
