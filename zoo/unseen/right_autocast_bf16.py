"""autocast to bfloat16 with a GradScaler that is disabled, gradients unscaled, clipped and stepped through it.

Right.
expected: same step
"""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(8)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = DDP(nn.Sequential(nn.Embedding(40, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 40)))
    data = TensorDataset(torch.randint(0, 40, (64, 11)))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=16 // dist.get_world_size(), sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (tokens,) in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(tokens[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
