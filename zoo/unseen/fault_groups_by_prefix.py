"""Fine-tuning with a small learning rate and weight decay for the pretrained backbone and a larger one for the new head; groups are made by names.

Wrong: under DDP all names begin with "module.", so nothing starts with "backbone." and everything gets the head's rate and no decay.
Source: https://github.com/huggingface/diffusers/issues/1895 is the same slip with EMA names; here for parameter groups
expected: parameter groups depend on the wrapper
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Tokens(Dataset):
    def __init__(self, n=128):
        self.ids = torch.randint(0, 30, (n, 8), generator=torch.Generator().manual_seed(30))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return self.ids[i], (self.ids[i] > 14).sum() // 3


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Embedding(30, 16), nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True))
        self.head = nn.Linear(16, 3)

    def forward(self, ids):
        return self.head(self.backbone(ids).mean(1))


def param_groups(model, lr, decay):
    backbone = [p for n, p in model.named_parameters() if n.startswith("backbone.")]
    rest = [p for n, p in model.named_parameters() if not n.startswith("backbone.")]
    groups = [{"params": backbone, "lr": lr / 10, "weight_decay": decay}, {"params": rest, "lr": lr, "weight_decay": 0.0}]
    return [g for g in groups if g["params"]]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--weight-decay", type=float, default=0.1)
    args = ap.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(4)
    model = net = Classifier()
    if world > 1:
        model = DDP(net)
    opt = torch.optim.AdamW(param_groups(model, args.lr, args.weight_decay))
    data = Tokens()
    loader = DataLoader(data, batch_size=args.batch_size // world, sampler=DistributedSampler(data, world, rank, shuffle=True, seed=0))
    for ids, y in loader:
        loss = nn.functional.cross_entropy(model(ids), y.clamp(max=2))
        opt.zero_grad()
        loss.backward()
        opt.step()
    if rank == 0:
        print("checksum", *[p.detach().double().norm().item() for p in net.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
