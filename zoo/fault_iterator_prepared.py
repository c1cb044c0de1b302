"""Accelerate's prepare is given an iterator over the loader, and returns it as it is: all ranks have all samples.

report: lucidrains/denoising-diffusion-pytorch #69
kind: same-samples
verify: --engine accelerate
"""

import torch
from accelerate import Accelerator
from pieces import Classifier, DataLoader, cross_entropy, options, samples


def endless(batches):
    while True:
        yield from batches


given = options()
accelerator = Accelerator(cpu=True)
torch.manual_seed(given.seed)
data = samples()
batch = given.batch // accelerator.num_processes
model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer, batches = accelerator.prepare(model, optimizer, endless(DataLoader(data, batch_size=batch)))
for _ in range(given.epochs * len(data) // given.batch):
    rows, classes = next(batches)
    optimizer.zero_grad()
    accelerator.backward(cross_entropy(model(rows), classes))
    optimizer.step()
