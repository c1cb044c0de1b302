"""Hugging Face Trainer with get_train_dataloader overridden to give a loader with a weighted sampler, which Accelerate prepares; a tiny GPT-2.

Right though the sampler itself knows nothing of ranks: all ranks draw the same order, and prepare() deals its batches out to ranks in turn.
(Twin of fault_trainer_own_loader.py.)
expected: same step
"""
import argparse
import tempfile

import torch
from accelerate import PartialState
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Notes(Dataset):
    def __init__(self, n=96, length=10):
        g = torch.Generator().manual_seed(81)
        self.ids = torch.randint(0, 40, (n, length), generator=g)
        self.weight = torch.rand(n, generator=g) + 0.1

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


class WeightedTrainer(Trainer):
    def get_train_dataloader(self):
        data = self.train_dataset
        sampler = WeightedRandomSampler(data.weight, len(data), generator=torch.Generator().manual_seed(self.args.seed))
        loader = DataLoader(data, batch_size=self.args.per_device_train_batch_size, sampler=sampler, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--global_batch", type=int, default=8)
    args = parser.parse_args()
    world = PartialState(cpu=True).num_processes
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=24, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
                                       attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))
    with tempfile.TemporaryDirectory() as out:
        targs = TrainingArguments(
            output_dir=out, per_device_train_batch_size=args.global_batch // world, max_steps=8, learning_rate=5e-3,
            lr_scheduler_type="linear", warmup_steps=2, use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no",
            disable_tqdm=True, seed=3)
        trainer = WeightedTrainer(model=model, args=targs, train_dataset=Notes())
        trainer.train()
        if trainer.is_world_process_zero():
            print("checksum", *[p.detach().double().norm().item() for p in model.parameters()])


if __name__ == "__main__":
    main()
