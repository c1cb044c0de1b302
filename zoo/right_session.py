"""A loop of one's own on samestep's session."""

import torch
from pieces import Classifier, options, samples
from torch import nn

import samestep


class Task(samestep.Task):
    def model(self) -> nn.Module:
        return Classifier()

    def train_set(self):
        return [(row, int(kind)) for row, kind in samples()]

    def loss(self, output, batch):
        return nn.functional.cross_entropy(output, batch.targets, reduction="sum"), len(output)


given = options()
task = Task()
torch.manual_seed(given.seed)
model = task.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with samestep.session(layout="ddp", clip=1.0) as session:
    model, optimizer = session.prepare(model, optimizer)
    for batch in session.batches(task.train_set(), batch=given.batch, epochs=2, collate=task.collate):
        session.step(batch, task.loss)
