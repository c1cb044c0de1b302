"""transformers' Trainer with a small GPT-2; its loss is divided by all ranks' tokens.

verify: --engine accelerate
"""

import os
import tempfile

import torch
from pieces import options, sentences
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Rows(Dataset):
    def __init__(self) -> None:
        self.tokens, self.labels = sentences().tensors

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row):
        return {"input_ids": self.tokens[row], "labels": self.labels[row]}


given = options()
torch.manual_seed(given.seed)
config = GPT2Config(
    vocab_size=20, n_positions=12, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
)
model = GPT2LMHeadModel(config)
world = int(os.environ.get("WORLD_SIZE", "1"))
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=given.batch // world,
        num_train_epochs=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=given.seed,
    )
    Trainer(model, arguments, train_dataset=Rows()).train()
