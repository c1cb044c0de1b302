"""F1 of held-out samples: predictions of all ranks are gathered as objects, and rank 0 computes it over all of them.

Right: 15 held-out samples, in uneven shares without repetitions.
expected: same step, same evaluation
"""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def f1(pairs):
    hits = sum(p == 1 and t == 1 for p, t in pairs)
    wrong = sum(p != t for p, t in pairs)
    return 2 * hits / max(2 * hits + wrong, 1)


def evaluate(model, held):
    rank, world = dist.get_rank(), dist.get_world_size()
    share = Subset(held, range(rank, len(held), world))
    pairs = []
    model.eval()
    with torch.inference_mode():
        for x, y in DataLoader(share, batch_size=3):
            pairs += list(zip(model.module(x).argmax(1).tolist(), y.tolist()))
    model.train()
    gathered = [None] * world if rank == 0 else None
    dist.gather_object(pairs, gathered, dst=0)
    if rank == 0:
        print("f1", f1([pair for part in gathered for pair in part]))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(14)
    x = torch.randn(79, 4)
    y = (x[:, 0] * x[:, 1] > 0).long()
    train, held = TensorDataset(x[:64], y[:64]), TensorDataset(x[64:], y[64:])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16 // dist.get_world_size(), sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 2)))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for a, b in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(a), b).backward()
            optimizer.step()
        evaluate(model, held)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
