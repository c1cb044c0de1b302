"""torchrun --standalone --nproc-per-node=2 accelerate_before.py"""

import torch
from accelerate import Accelerator
from small import loss, net, points, tell
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(points(), batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(10):
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(loss(model(inputs), targets))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
tell(accelerator.unwrap_model(model))
accelerator.end_training()
