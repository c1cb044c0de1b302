"""Hugging Face Trainer, a tiny Llama, answers of different lengths (prompt labels are -100), two micro-batches per step.

Right: the Trainer counts the tokens of all micro-batches and ranks (average_tokens_across_devices) and undoes DDP's mean.
(Twin of fault_trainer_local_tokens.py.)
Source: https://github.com/huggingface/transformers/pull/34191
expected: same step
"""
import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from accelerate import PartialState


class Chats(Dataset):
    def __init__(self, n=64, length=14):
        g = torch.Generator().manual_seed(18)
        self.ids = torch.randint(1, 50, (n, length), generator=g)
        self.labels = self.ids.clone()
        for row in self.labels:
            row[: int(torch.randint(1, length - 1, (1,), generator=g))] = -100

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--global_batch", type=int, default=8)
    parser.add_argument("--average_tokens", type=int, default=1)
    args = parser.parse_args()
    world = PartialState(cpu=True).num_processes
    set_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32))
    with tempfile.TemporaryDirectory() as out:
        targs = TrainingArguments(
            output_dir=out, per_device_train_batch_size=args.global_batch // world // 2, gradient_accumulation_steps=2, max_steps=8, learning_rate=0.3, optim="sgd",
            lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=0.0, use_cpu=True, report_to=[], save_strategy="no",
            logging_strategy="no", disable_tqdm=True, average_tokens_across_devices=bool(args.average_tokens), seed=1)
        trainer = Trainer(model=model, args=targs, train_dataset=Chats())
        trainer.train()
        if trainer.is_world_process_zero():
            print("checksum", *[p.detach().double().norm().item() for p in model.parameters()])


if __name__ == "__main__":
    main()
