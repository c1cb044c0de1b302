"""A Trainer whose own loss ignores num_items_in_batch: a mean of each micro-batch's tokens, over all of them.

report: huggingface/transformers #37766
kind: mean-of-means
verify: --engine accelerate --script "--batch 8 --accumulate 2" --alone "--batch 16"
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


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        scores = model(**inputs).logits
        return torch.nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


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
        gradient_accumulation_steps=given.accumulate,
        num_train_epochs=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=given.seed,
    )
    trainer = OwnLoss(model, arguments, train_dataset=Rows())
    trainer.model_accepts_loss_kwargs = False
    trainer.train()
