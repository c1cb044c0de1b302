"""A small language model; after each epoch the held-out perplexity: exp of the mean loss.

Wrong: each rank takes exp of its own mean, and the perplexities are averaged over ranks.
Source: https://github.com/EleutherAI/gpt-neox/issues/331
expected: the perplexity is another one than one process has
"""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def perplexity(model, loader):
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for (t,) in loader:
            loss = nn.functional.cross_entropy(model(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten(), reduction="sum")
            total += loss.item()
            count += t[:, 1:].numel()
    model.train()
    value = torch.tensor(total / count).exp()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(2)
    g = torch.Generator().manual_seed(4)
    text = torch.randint(0, 25, (48 + 16, 10), generator=g)
    train, held = TensorDataset(text[:48]), TensorDataset(text[48:] // torch.arange(1, 17)[:, None])
    world = dist.get_world_size()
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, batch_size=16 // world, sampler=sampler)
    held_loader = DataLoader(held, batch_size=4, sampler=DistributedSampler(held, shuffle=False))
    model = DDP(nn.Sequential(nn.Embedding(25, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 25)))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (t,) in loader:
            loss = nn.functional.cross_entropy(model(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        value = perplexity(model, held_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} perplexity {value.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
