"""torchrun --standalone --nproc-per-node=2 ddp_before.py"""

import torch
import torch.distributed as dist
from small import loss, net, points, tell
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
model = DistributedDataParallel(net())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = DistributedSampler(points())
loader = DataLoader(points(), batch_size=16, sampler=sampler)
for epoch in range(10):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
tell(model.module)
dist.destroy_process_group()
