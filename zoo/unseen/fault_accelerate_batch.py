"""Accelerate script that was written for one process: DataLoader with the batch size of the recipe, everything goes through prepare().

Wrong: prepare() makes it the batch per process, so on two ranks the global batch is twice the recipe's and there are half the steps.
Source: https://github.com/huggingface/accelerate/pull/1013 (documentation of the observed batch size)
expected: global batch grows with the number of processes
"""
import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    config = BertConfig(vocab_size=40, hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48,
                        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=12, num_labels=2)
    model = BertForSequenceClassification(config)
    g = torch.Generator().manual_seed(5)
    ids = torch.randint(1, 40, (64, 9), generator=g)
    loader = DataLoader(TensorDataset(ids, (ids[:, 0] > 20).long()), batch_size=args.batch_size, shuffle=False)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, opt, loader = accelerator.prepare(model, opt, loader)
    steps = 0
    for input_ids, labels in loader:
        loss = model(input_ids=input_ids, labels=labels).loss
        accelerator.backward(loss)
        opt.step()
        opt.zero_grad()
        steps += 1
    accelerator.print("steps", steps)
    if accelerator.is_main_process:
        print("checksum", *[p.detach().double().norm().item() for p in accelerator.unwrap_model(model).parameters()])
    accelerator.end_training()


if __name__ == "__main__":
    main()
