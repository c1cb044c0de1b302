"""A language model with tied embedding and output weights; gradients are reduced by hand, module by module.

Wrong: the tied weight is met twice (in the embedding and in the head) and summed over ranks twice, so its gradient is world-size times too large.
Source: none found for this loop; cf. Megatron's separate reduction of tied embeddings
expected: gradient of the shared weight reduced twice
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TiedLM(nn.Module):
    def __init__(self, vocab=32, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.LSTM(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def reduce_by_module(model):
    for layer in (model.embed, model.rnn, model.head):
        for p in layer.parameters():
            dist.all_reduce(p.grad)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--global-batch", type=int, default=16)
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = TiedLM()
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    data = TensorDataset(torch.randint(0, 32, (128, 11), generator=torch.Generator().manual_seed(2)))
    loader = DataLoader(data, batch_size=args.global_batch // world, sampler=DistributedSampler(data, world, rank, shuffle=False))
    for (ids,) in loader:
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad()
        (loss / world).backward()
        if world > 1:
            reduce_by_module(model)
        opt.step()
    if rank == 0:
        print("checksum", *[p.detach().double().norm().item() for p in model.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
